"""The compile gate finds every planted fault, and nothing else."""

import json
import random
import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from early_end import compiled_to
from typer.testing import CliRunner

from flash_delta.compiler.pool import Job, Result, compile_all, find_jobs
from workshop.cli.app import app
from workshop.gate.lint import transposed_accumulators
from workshop.gate.record import changes, key_of, read, rows, within, write
from workshop.gate.rules import judge

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

RECORDS = Path(__file__).parent.parent / "benchmarks" / "compile"
FAULTY = ["faulty_kernels"]
TARGETS = ["sm_80", "sm_89", "sm_90a", "sm_100", "gfx942"]
CLEAN = {"registers": 100, "spilled": 0, "shared": 1024}
SPILLS = Result("m/large/f", "sm_80", CLEAN | {"spilled": 12})


@needs_triton
def test_every_planted_fault_is_found():
    """The launch that aborts its process costs no other result."""
    from workshop.gate.facts import facts

    _, jobs = find_jobs(FAULTY, TARGETS)
    results = sorted(result for found in compile_all(jobs, facts) for result in found)
    found = [line.removeprefix("faulty_kernels/") for line in judge(results, {})]
    assert judge(results, rows(results)) == [f"faulty_kernels/{line}" for line in found if ": spills " not in line]
    wrong = dict(line.split(": ", 1) for line in found)
    assert {(r.kernel, r.target) for r in results} >= {("faulty_kernels/good/product", target) for target in TARGETS}
    assert wrong.keys() == {
        "crash, sm_80",
        "shared/product, sm_89",
        "large/product, sm_90a",
        "lint/transposed_accumulator, sm_90a",
        "barriers/turned, sm_90a",
        "tensor/product, sm_100",
        "compile, gfx942",
        "warning, gfx942",
    }
    assert wrong["warning, gfx942"] == "does not compile: UserWarning: this option will go"
    assert wrong["crash, sm_80"].startswith("does not compile: the compiler crashed")
    assert wrong["shared/product, sm_89"].endswith("bytes of shared memory of 101,376")
    assert wrong["tensor/product, sm_100"].endswith("columns of tensor memory of 512")
    assert wrong["lint/transposed_accumulator, sm_90a"].startswith("a product is transposed and multiplied again")
    assert wrong["barriers/turned, sm_90a"].startswith("a barrier's shared memory has another use (%bars")
    assert wrong["compile, gfx942"].startswith("does not compile: AssertionError: input_precision must be one of")
    (large,) = (r.facts for r in results if r.kernel == "faulty_kernels/large/product")
    assert large["spilled"] > 0
    assert large["serialised"]
    assert large["WARPGROUP.DEPBAR"] >= large["HGMMA"] > 0
    assert any(warning in large["warnings"] for warning in ("C7510", "C7511", "C7512"))


@pytest.mark.parametrize("fault", ["serialised", "lint", "barriers", "shared", "tensor"])
def test_no_record_allows_another_fault(fault):
    result = SPILLS._replace(
        facts=SPILLS.facts | {"warnings": [], fault: ["a barrier"] if fault == "barriers" else 10**6}
    )
    assert len(judge([result], rows([result]))) == 1


def test_a_name_of_two_regions():
    product = "%z = ttng.warp_group_dot %y, %b, %c : tensor<64x64xbf16, #op> * tensor<64x64xbf16, #op>"
    turned = ["%x = tt.trans %a {order} : tensor<64x64xbf16, #mma> -> tensor<64x64xbf16, #linear>"]
    turned += ["%y = ttg.convert_layout %x : tensor<64x64xbf16, #linear> -> tensor<64x64xbf16, #op>", product]
    assert transposed_accumulators("\n".join(turned)) == [product]
    again = "%y = arith.truncf %a : tensor<64x64xf32, #op> to tensor<64x64xbf16, #op>"
    assert transposed_accumulators("\n".join([*turned[:2], "}", again, product])) == []


def test_record(tmp_path):
    path = tmp_path / "folder" / "triton-3.6.0.json"
    found = rows([SPILLS, SPILLS._replace(target="gfx942"), Result("m/broken", "sm_80", None, "no")])
    write(path, found)
    assert path.read_text().count("\n") == 4
    assert read(path) == found
    assert within(found, ["m"], ["sm_80"]).keys() == {"m/large/f @ sm_80"}
    assert within(found, ["n"], ["sm_80"]) == {}
    assert changes(found, found) == []
    moved = found | {"m/large/f @ sm_80": CLEAN, "m/new/f @ sm_80": CLEAN}
    del moved["m/large/f @ gfx942"]
    assert changes(found, moved) == [
        "m/large/f @ gfx942: recorded, but not there any more",
        "m/new/f @ sm_80: not recorded yet",
        "m/large/f @ sm_80: spilled 12 -> 0",
    ]


@pytest.mark.parametrize("path", sorted(RECORDS.glob("triton-*.json")), ids=lambda path: path.stem)
def test_what_is_recorded_is_as_it_should_be(path):
    recorded = read(path)
    assert judge([Result(*key.split(" @ "), facts) for key, facts in recorded.items()], recorded) == []


@needs_triton
def test_the_command_records_what_it_finds(tmp_path):
    from triton import __version__ as triton

    path, key = tmp_path / f"triton-{triton}.json", "faulty_kernels/good/product @ sm_120"
    write(path, {key: {"registers": 1}, "other/f/f @ sm_120": {}})
    command = ["compile", "faulty_kernels", "--target", "sm_120", "--record", str(tmp_path)]
    ran = CliRunner().invoke(app, [*command, "--update"])
    assert ran.exit_code == 0, ran.output
    recorded = json.loads(path.read_text())
    assert recorded.keys() == {key, "other/f/f @ sm_120"}
    assert recorded[key]["HMMA"] > 0
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output  # facts do not change from run to run
    ran = CliRunner().invoke(app, [*command, "--stale"])
    assert ran.exit_code == 0, ran.output
    assert "0 of 1 launches are stale" in ran.output
    assert "1 kernels are as they should be (0 of them compiled now)" in ran.output


@needs_triton
def test_what_is_stale(tmp_path, monkeypatch):
    """A launch is compiled again if one of its kernels has another key, is new, or cannot be named."""
    jobs = [Job("faulty_kernels", launch, "sm_120") for launch in ("same", "changed", "grown", "broken")]
    same, kept, moved, old, new = (
        Result(f"faulty_kernels/{name}", "sm_120", CLEAN | {"key": "a"})
        for name in ("same/f", "changed/f", "changed/g", "grown/f", "grown/g")
    )
    broken = Result("faulty_kernels/broken", "sm_120", None, "no")
    recorded = rows([same, kept, moved._replace(facts=CLEAN | {"key": "b"}), old])
    compiled = {"same": [same], "changed": [kept, moved], "grown": [old, new], "broken": [broken]}

    def compile_all(jobs, look, compiles=True):
        for job in jobs:
            yield [r if compiles or r.facts is None else r._replace(facts={"key": "a"}) for r in compiled[job.launch]]

    monkeypatch.setattr("workshop.cli.compile.find_jobs", lambda *_: ("3.6.0", jobs))
    for name in ("workshop.cli.compile.compile_all", "workshop.gate.stale.compile_all"):
        monkeypatch.setattr(name, compile_all)
    write(tmp_path / "triton-3.6.0.json", recorded)
    command = ["compile", "faulty_kernels", "--target", "sm_120", "--record", str(tmp_path), "--stale"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 1
    lines = ran.output.splitlines()
    assert lines[:4] == ["3 of 4 launches are stale", *(f"faulty_kernels/{job.launch}, sm_120" for job in jobs[1:])]
    assert lines[-3:] == [
        "faulty_kernels/broken, sm_120: does not compile: no",
        "changed (--update records it): faulty_kernels/grown/g @ sm_120: not recorded yet",
        "changed (--update records it): faulty_kernels/changed/g @ sm_120: the same facts, of other code",
    ]
    del compiled["broken"], jobs[-1]
    assert CliRunner().invoke(app, [*command, "--update"]).exit_code == 0
    assert read(tmp_path / "triton-3.6.0.json") == rows([same, kept, moved, old, new])
    assert "0 of 3 launches are stale" in CliRunner().invoke(app, command).output


@needs_triton
@pytest.mark.parametrize("known", [None, 0, 8])
def test_more_spills_are_recorded_only_when_asked_for(known, tmp_path, monkeypatch):
    """Also a kernel that is not recorded must not spill. Others are recorded as usual, and fewer spills are."""
    bad, good, less = (SPILLS._replace(kernel=f"faulty_kernels/{name}/f") for name in ("bad", "good", "less"))
    results = [bad, good._replace(facts=CLEAN), less]
    monkeypatch.setattr("workshop.cli.compile.find_jobs", lambda *_: ("3.6.0", []))
    monkeypatch.setattr("workshop.cli.compile.compile_all", lambda *_: [results])
    path, old = tmp_path / "triton-3.6.0.json", {key_of(less): CLEAN | {"spilled": 99}}
    old |= {} if known is None else {key_of(bad): CLEAN | {"spilled": known}}
    write(path, old)

    def run(*options):
        command = ["compile", "faulty_kernels", "--target", "sm_80", "--record", str(tmp_path), *options]
        ran = CliRunner().invoke(app, command)
        return ran.exit_code, ran.output

    said = f"faulty_kernels/bad/f, sm_80: spills 12 bytes, {known or 0} are recorded (--update --spills records it)"
    for options in ([], ["--update"]):
        code, output = run(*options)
        assert code == 1
        assert said in output
        assert f"changed (--update records it): {key_of(less)}: spilled 99 -> 12" in output or options
    assert read(path) == old | rows(results[1:])
    assert run("--update", "--spills")[0] == 0
    assert read(path) == rows(results)
    assert run()[0] == 0


@needs_triton
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_75"], "target: expected one of sm_80, "),
        (["--spills"], "spills: expected --update beside it, got"),
        (["nothing.here"], "modules: expected a module that can be imported from "),
    ],
)
def test_the_command_refuses(arguments, message):
    ran = CliRunner().invoke(app, ["compile", *arguments])
    assert ran.exit_code == 2
    assert message in ran.output


def compilations(module, launch):
    """How many kernels one call asks for, and how many it and 50 more of random lengths. The gate compiles them."""
    from importlib import import_module

    from triton import knobs

    from flash_delta.compiler.offline import offline

    asked = set()

    def ask(*, fn, key, **others):
        asked.add((fn.name, key))
        return True  # instead of compiling

    with offline("sm_90a"), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = ask
        call = getattr(import_module(module), launch)
        call(64)
        first = len(asked)
        for steps in random.Random(0).sample(range(1, 10_000), 50):
            call(steps)
        return first, len(asked)


def family(tokens):
    """Every kernel of the Triton backend, forward and backward."""
    from workshop.gate.cases import rule

    rule.call_chunks(rule.RuleCase(raw=True, tokens=tokens))
    rule.call("scan", rule.RuleCase(tokens=tokens), False, rule.Tile(4, 2, 32))
    rule.call("scan_backward", rule.RuleCase(tokens=tokens), True, rule.Tile(4, 2, 32))


def channels(tokens):
    """Those of its kernels that are there for a decay per channel, and those that have another form with it."""
    from workshop.gate.cases import rule

    rule.call_chunks(rule.RuleCase(gate="channel", raw=True, tokens=tokens))


def decoding(tokens):
    """More than a call may have are as good here. ``tokens`` rows would be, but for the grid."""
    from workshop.gate.cases import serving

    serving.call_decode(serving.Decoding(tokens=tokens))


def prefilling(tokens):
    """With checkpoints, of which there are more the longer sequences are."""
    from workshop.gate.cases import rule, serving

    case = serving.Prefilling(rule.RuleCase(gate="channel", raw=True, tokens=tokens))
    serving.call_prefill(case)
    serving.call_prefill(case, rule.Tile(4, 2, 32))


def prompts(tokens):
    """What comes around the rule, with heads whose rows are no multiples of 16 numbers."""
    from workshop.gate.cases import prompts, rule

    prompts.call_prompts(rule.RuleCase(100, tokens=tokens))


def variants_of_decode():
    """What the kernel computes, by whether there is a write, a count of accepted tokens, a tree, a token alone, packed
    rows, a pool of its own to write; then what the kernels around it compute, also with rolling windows."""
    from workshop.gate.cases import serving

    draft, forms = serving.Decoding(tokens=4), ((True, True), (False, True), (False, False))
    tree, whole = draft._replace(tree=True), draft._replace(whole=True)
    bare = [(case, *form) for case in (serving.Decoding(), draft) for form in forms]
    bare += [(case, *form) for case in (tree, draft._replace(write=draft.dtype)) for form in forms[:2]]
    around = [{}, {"tokens": 1}, {"rolling": True}, {"packed": True}, {"write": draft.dtype}, {"tree": True}]
    bare.append((draft._replace(packed=True), True, True))
    groups = [[computed(case, counted=counted, written=written)[0] for case, counted, written in bare]]
    return groups + [list(kernel) for kernel in zip(*[computed(whole._replace(**x)) for x in around], strict=True)]


def computed(case, *choice, counted=True, written=True):
    from flash_delta.compiler.offline import offline
    from workshop.gate.cases import serving

    with compiled_to("ttgir"), offline("sm_90a") as compiled:
        serving.call_decode(case, *choice, counted=counted, written=written)
    return [arithmetic(c.kernel.asm["ttgir"]) for c in compiled]


def tiles_of_decode():
    """What `decode` computes with the tile for few rows and with that for many, but not for how many columns. Then the
    same of drafts that leave records, which first apply those of others, with so many tokens that none is held."""
    from flash_delta.kernels.triton.tiles import DECODE, FEW, RECORDS
    from workshop.gate.cases import serving

    groups = []
    for dtype, (tokens, records) in product((torch.float32, torch.bfloat16), ((1, False), (8, False), (8, True))):
        tiles = RECORDS[dtype.itemsize] if records else (FEW[dtype.itemsize], DECODE[True, dtype.itemsize][1])
        case = serving.Decoding(dtype=dtype, tokens=tokens, records=records)
        groups.append([lines_of(t, computed(case, t)[0]) for t in tiles])
    return groups


def held_drafts():
    """What `decode` computes of a draft, and what is computed of one whose tokens and records are held."""
    from flash_delta.kernels.triton.tiles import DECODE, HELD
    from workshop.gate.cases import serving

    found = []
    models = {"head": serving.RuleCase(raw=True), "channel": serving.BOUNDED}
    for (kind, size), (_, tile) in HELD.items():
        draft = serving.Decoding(models[kind], dtype={4: torch.float32, 2: torch.bfloat16}[size], tokens=4)
        plain = lines_of(DECODE[True, size][1], computed(draft)[0])
        found.append((plain, lines_of(tile, computed(draft._replace(records=True))[0])))
    return found


def lines_of(t, lines):
    return [of_columns(t, line) for line in lines if "arith.extf" not in line]


def of_columns(t, line):
    """The line without how many value columns a program has. Of an operation number by number also without how these
    lie in threads."""
    line = re.sub(rf"(?<=<){t.BV}(?=x)|(?<=x){t.BV}(?=x\d)", "BV", line)
    return line.split(",#ttg")[0].rstrip(",>") if line.startswith("=") else line


def variants_of_offsets():
    """What `decode` computes of a token, and what is computed of one on the way to a checkpoint's offset."""
    from flash_delta.compiler.offline import offline
    from workshop.gate.cases import serving

    found, pools = [], (torch.float32, torch.bfloat16)
    for model, dtype, v_first in product((serving.RuleCase(raw=True), serving.BOUNDED), pools, (True, False)):
        with compiled_to("ttgir"), offline("sm_90a") as compiled:
            serving.call_decode(serving.Decoding(model, dtype, v_first, tokens=4))
            for before in (True, False):
                serving.call_prefill(serving.Prefilling(model, dtype, v_first, offsets=True), before=before)
        lines = [arithmetic(c.kernel.asm["ttgir"]) for c in compiled]
        found.append([[line for line in kernel if "arith.extf" not in line] for kernel in lines])
    return found


def arithmetic(ttgir):
    """Its operations on floating-point numbers in their order, except moves and loads. Sums over several threads come
    with their layouts, since these decide the order of additions. What Triton computes again, in another layout, is
    left out."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    lines = [re.sub(r"%[\w#:.-]+|loc\(.*?\)+|\s+", "", line) for line in once(ttgir.splitlines())]
    sums = r"^}\):\(tensor"  # the end of a tt.reduce, with its types
    chosen = [line for line in lines if re.search(rf"=(arith\.\w*f\b|math\.|\"tt\.reduce|tt\.extern)|{sums}", line)]
    kept = [lambda name: "", lambda name: layouts[name[0]]]
    return [re.sub(r"#blocked\d*", kept[bool(re.match(sums, line))], line) for line in chosen]


def once(lines):
    """The lines without those that compute what a line before has computed, if only in another layout."""
    known, same = {}, {}  # the first name of each operation on these operands; other names of a value
    for line in lines:
        if re.match(r"\s*}", line) or line.split(" loc(")[0].endswith("{"):
            known.clear()  # other regions may use the same names
        found = re.match(r"\s*(%[\w.-]+) = ((?:arith|math|tt|ttg)\.\w+) (.*?) : (.*)", line)
        if found and not found[2].endswith("load"):
            name, operation, operands, types = found.groups()
            operands = re.sub(r"%[\w.-]+", lambda operand: same.get(operand[0], operand[0]), operands)
            shapes = re.findall(r"tensor<(\w+)", types)
            moved = operation == "ttg.convert_layout"
            same[name] = operands if moved else known.setdefault((operation, operands, *shapes), name)
            if same[name] != name and operation.startswith(("arith.", "math.")):
                continue
        yield line


def test_once():
    """What is computed again in another layout is left out, but not what another region computes with these names."""
    text = [
        "%1 = arith.mulf %a, %b : tensor<8xf32, #blocked>",
        "%2 = ttg.convert_layout %1 : tensor<8xf32, #blocked> -> tensor<8xf32, #blocked1>",
        "%3 = arith.mulf %a, %b : tensor<8xf32, #blocked1>",
        "%4 = arith.subf %3, %2 : tensor<8xf32, #blocked1>",
        "%5 = arith.subf %1, %3 : tensor<8xf32, #blocked>",
        "%6 = arith.mulf %a, %b : tensor<4xf32, #blocked1>",
        "scf.if %c {",
        "%7 = arith.mulf %a, %b : tensor<8xf32, #blocked>",
    ]
    assert list(once(text)) == [text[0], text[1], text[3], *text[5:]]


def fused(lines):
    return sum("math.fma" in line for line in lines)


def specialised_product(steps):
    from faulty_kernels import multiply

    multiply(64, 64, 64, steps=steps)


@needs_triton
@pytest.mark.parametrize(
    ("launch", "first", "total"),
    [
        ("family", 8, 8), ("channels", 6, 6), ("decoding", 1, 1), ("prefilling", 4, 4), ("prompts", 2, 2),
        ("specialised_product", 1, 2),
    ],
)  # fmt: skip
def test_random_lengths_compile_nothing_new(process, launch, first, total):
    """A kernel that is specialised on its length compiles again for one that is no multiple of 16."""
    assert process.submit(compilations, __name__, launch).result() == (first, total)


@needs_triton
def test_variants_of_decoding_compute_the_same(process):
    """No product is contracted, so this is what makes their results equal to the bit."""
    groups = process.submit(variants_of_decode).result()
    for (first, *others), least in zip(groups, (20, 8, 20, 8), strict=True):  # `decode`; convolution, `decode`, norm
        assert len(first) > least
        assert all(other == first for other in others)


@needs_triton
def test_tiles_of_decoding_compute_the_same(process):
    """A row has the same bits beside any number of rows. Its tokens have the same bits if they leave records."""
    found = process.submit(tiles_of_decode).result()
    for few, usual in found:
        assert len(few) > 20
        assert few == usual
    for (plain, _), (recorded, _) in zip(found[1::3], found[2::3], strict=True):
        assert recorded[:2] + recorded[2 - len(plain) :] == plain  # -e^A_log; what is between applies records


@needs_triton
def test_a_draft_that_holds_its_tokens_computes_what_others_do(process):
    """First the norms of all tokens and of no others, then the tokens one after the other, with the same sums. The
    state after the last token is not rounded, since nobody needs it."""
    for plain, held in process.submit(held_drafts).result():
        begin = next(n for n, line in enumerate(plain) if line.startswith("=arith.mulf") and "xBVx" in line)
        step = plain[begin:]
        steps, rounded = 4 * step, [line for line in step if "truncf" in line and "xBVx" in line]
        for line in rounded:
            del steps[-1 - steps[::-1].index(line)]
        assert len(step) > 20
        assert held[-len(steps) :] == steps
        assert summed(held[: -len(steps)]) == 4 * summed(plain[:begin])


def summed(lines):
    """The sums of lines, with where their terms lie."""
    return [line for line in lines if "tt.reduce" in line or line.startswith("})")]


@needs_triton
def test_with_narrow_heads_threads_load_as_much_at_once_as_with_wide_ones():
    """Otherwise a value column would have more threads with some tiles than with others, and other sums."""
    from flash_delta.kernels.triton.tiles import DECODE, HELD, RECORDS

    for size, tiles in RECORDS.items():
        for t in (*tiles, DECODE[True, size][0], HELD["head", size][0], HELD["channel", size][0]):
            assert t.BV * 16 * size >= 32 * t.warps * 16, (size, t)  # 16 channels; 32 threads of 16 bytes


@needs_triton
def test_tokens_before_an_offset_are_what_decoding_makes_of_them(process):
    """They run through the same operations in the same order and layouts, without those of the output. When a number
    becomes a float32 one does not matter."""
    for decoded, *walks in process.submit(variants_of_offsets).result():
        assert len(walks) == 2
        for walked in walks:
            rest = iter(decoded)
            assert all(line in rest for line in walked), "it computes what `decode` does not"
            assert len(walked) > len(decoded) // 2
            assert (fused(decoded) - 1) / 2 == fused(walked) - 1  # besides what is written, two sums and one
