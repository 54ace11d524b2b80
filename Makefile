# make demo   trains a small hybrid model on the CPU, lets it write and reports on it: under five minutes on two cores
# make test   style and tests
# make clean  removes what these made
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo

# A model this small gains little from a second thread, and loses much whenever that thread has to wait for its core.
export OMP_NUM_THREADS := 1

.PHONY: demo test clean

demo: .venv/installed
	rm -rf $(RUN)
	$(BIN)/flash-delta check
	$(BIN)/flash-delta train --out $(RUN) --mixers gdn,kda,gdn,attention --steps 600 --batch-size 4
	$(BIN)/flash-delta generate $(RUN) --prompt 'def '
	$(BIN)/flash-delta report $(RUN)

test: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pytest

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv $(RUN)
