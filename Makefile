# make demo   trains a small hybrid model on the CPU, lets it write and reports on it: under five minutes on two cores
# make test   style and tests
# make clean  removes what these made
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo

# Models this small gain little from a second thread and lose much when it has to wait: on two cores the demo's model
# trains at 5,500 tokens/s with one thread, 6,100 with two, and 700 with two beside another busy process.
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
