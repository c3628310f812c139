"""Tuning files: what one process exports another one uses; damaged, foreign and hostile ones are refused by
name and change nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.codegen.opts_kernels import elementwise, matmul
from whit import Tensor
from whit.engine import beam, tuning
from whit.engine.compile import clear, compiled
from whit.engine.tuning import Entry
from whit.helpers import Context, FileFormatError
from whit.runtime.device import Device

ROOT = Path(__file__).parents[2]
HERE = Device.get("CPU").target.key
AST = matmul(24, 32, 16)
ENTRY = Entry(
    tuning.kernel_key(AST), HERE, "r_24_32_r16", "UPCAST axis 1 by 16, UNROLL axis 2 by 4",
    "UPCAST axis 1 by 8", 2, True, 2e-6, 1e-6,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with Context(WHIT_CACHE=str(tmp_path / "cache")):
        yield tmp_path / "cache"


def write(path: Path, *entries: Entry) -> str:
    tuning.write_file(str(path), entries)
    return str(path)


def test_what_is_exported_can_be_imported(tmp_path: Path) -> None:
    other = ENTRY._replace(kernel="0" * 32, opts="")
    tuning.save(ENTRY)
    tuning.save(other)
    tuning.save(ENTRY._replace(kernel="1" * 32, complete=False))  # an interrupted search is nobody else's
    tuning.save(ENTRY._replace(kernel="2" * 32, target="another machine"))
    path = str(tmp_path / "tuned.jsonl")
    assert beam.export_file(path) == 2
    assert sorted(tuning.read_file(path)) == sorted([ENTRY, other])
    with Context(WHIT_CACHE=str(tmp_path / "elsewhere")):
        assert tuning.load(AST, HERE) is None
        assert beam.import_file(path) == 2
        assert tuning.load(AST, HERE) == ENTRY
        with Context(BEAM=2):
            assert beam.known(AST, HERE) == ENTRY.opts
        with Context(BEAM=3):
            assert beam.known(AST, HERE) is None  # a wider search is due
        with Context(BEAM=2, NOOPT=1):
            assert beam.known(AST, HERE) is None
        with Context(BEAM=-7):  # a beam of one
            assert beam.known(AST, HERE) == ENTRY.opts
        tuning.save(ENTRY._replace(width=1000))
        with Context(BEAM=10**9):
            assert beam.known(AST, HERE) == ENTRY.opts


def test_a_tuning_file_is_lines_of_json(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "tuned", ENTRY))
    head, line = map(json.loads, path.read_text().splitlines())
    assert head["format"] == "whit tuning" and head["whit"] and isinstance(head["version"], int)
    assert line["kernel"] == AST.key.hex() and line["target"] == HERE and line["opts"] == ENTRY.opts


def test_kernels_have_the_same_name_in_every_process(tmp_path: Path) -> None:
    code = "from tests.codegen.opts_kernels import matmul; print(matmul(24, 32, 16).key.hex())"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert out.stdout.strip() == ENTRY.kernel


def test_tuned_gives_a_kernel_its_opts(tmp_path: Path) -> None:
    path = write(tmp_path / "tuned", ENTRY)
    try:
        with Context(TUNED=path):
            assert beam.chosen(AST, "CPU") == tuning.parse_opts(ENTRY.opts)
            assert (
                compiled(AST, "CPU").work.name == "r_2_r4_24_u16_R4"
                or "u16" in compiled(AST, "CPU").work.name
            )
            assert beam.chosen(elementwise(5), "CPU") is None
            with Context(NOOPT=1):
                assert beam.chosen(AST, "CPU") is None
        plain = compiled(AST, "CPU").work.name
        write(tmp_path / "tuned", ENTRY._replace(opts="UNROLL axis 2 by 2"))
        clear()
        with Context(TUNED=path):  # a changed file is read again, and what the disk cache has is not stale
            assert "R2" in compiled(AST, "CPU").work.name != plain
    finally:
        clear()


def test_a_program_uses_a_shipped_file(tmp_path: Path) -> None:
    """A search in one process, its results in another one with a cache of its own."""
    code = """
        import numpy as np
        from whit import Tensor
        from whit.engine import beam
        x = np.arange(48 * 40, dtype=np.float32).reshape(48, 40) % 7
        assert ((Tensor(x) @ Tensor(x.T)).numpy() == x @ x.T).all()
        import sys
        print("whit.engine.workers" in sys.modules)
    """

    def python(folder: str, *command: str, **environment: str) -> str:
        settings = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "WHIT_CACHE": str(tmp_path / folder),
            **environment,
        }
        done = subprocess.run(
            [sys.executable, *command], env=settings, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    file, code = str(tmp_path / "tuned.jsonl"), textwrap.dedent(code)
    assert python("a", "-c", code, BEAM="1", BEAM_TIME="1") == "True"
    count = re.fullmatch(
        r".*tuned.jsonl: (\d+) kernels", python("a", "-m", "whit.engine.beam", "export", file)
    )
    assert count is not None and int(count[1]) >= 1
    assert python("b", "-c", code, TUNED=file, BEAM="1") == "False"  # no search
    assert python("c", "-m", "whit.engine.beam", "import", file).endswith(f"{count[1]} kernels")
    assert python("c", "-c", code, BEAM="1") == "False"


# ---- files that are refused --------------------------------------------------------------------------------

HEAD = json.dumps({"format": tuning.FORMAT, "version": tuning.VERSION, "whit": tuning.WHIT})
LINE = tuning.dump(ENTRY)


def changed(**fields: Any) -> str:
    return json.dumps({**ENTRY._asdict(), **fields})


BAD: dict[str, tuple[bytes | str, str]] = {
    "empty": ("", "not JSON"),
    "binary": (bytes(range(256)), "not UTF-8"),
    "zeros": (bytes(100), "not JSON"),
    "other JSON": ("[1, 2]\n", "a JSON list"),
    "a number": ("7\n", "a JSON int"),
    "other lines": ('{"model": "resnet", "lr": 0.1}\n', "does not begin"),
    "other version": (HEAD.replace(f'"version": {tuning.VERSION}', '"version": 99') + "\n", "format 99"),
    "version as text": (HEAD.replace(f": {tuning.VERSION},", f': "{tuning.VERSION}",') + "\n", "format"),
    "other whit": (HEAD.replace(tuning.WHIT, "9.9.9") + "\n", "whit 9.9.9"),
    "more in the head": (HEAD[:-1] + ', "run": "rm"}\n', "whit"),
    "cut off": (f"{HEAD}\n{LINE}", "cut off"),
    "half a line": (f"{HEAD}\n{LINE[:50]}\n", "line 2: it is not JSON"),
    "an empty line": (f"{HEAD}\n\n{LINE}\n", "line 2: it is not JSON"),
    "second line": (f"{HEAD}\n{LINE}\n{changed(kernel=5)}\n", "line 3: kernel is '5', not str"),
    "deep": (f"{HEAD}\n{'[' * 50000}\n", "line 2: it is not JSON"),
    "long": (f"{HEAD}\n{changed(name='x' * (1 << 17))}\n", "line 2: a line of"),
    "no digest": (f"{HEAD}\n{changed(kernel='../../../etc/passwd')}\n", "hexadecimal"),
    "digest of digits that are not": (f"{HEAD}\n{changed(kernel='²' * 32)}\n", "hexadecimal"),
    "no such opt": (f"{HEAD}\n{changed(opts='FORMAT axis 0 by 3')}\n", "FORMAT axis 0 by 3"),
    "code": (f"{HEAD}\n{changed(opts='__import__(0)')}\n", "__import__"),
    "negative": (f"{HEAD}\n{changed(opts='UPCAST axis 0 by -3')}\n", "by -3"),
    "huge": (f"{HEAD}\n{changed(opts='UPCAST axis 0 by ' + '9' * 5000)}\n", "UPCAST axis 0"),
    "no digits": (f"{HEAD}\n{changed(opts='UPCAST axis 0 by ²')}\n", "by ²"),
    "other digits": (f"{HEAD}\n{changed(opts='UPCAST axis 0 by ٣')}\n", "by ٣"),
    "bad base": (f"{HEAD}\n{changed(base='nothing')}\n", "nothing"),
    "many opts": (f"{HEAD}\n{changed(opts=', '.join(['SWAP axis 0 with 1'] * 65))}\n", "65 opts"),
    "missing": (f'{HEAD}\n{{"kernel": "{"0" * 32}"}}\n', "fields"),
    "more": (f"{HEAD}\n{changed(shell='rm')}\n", "shell"),
    "twice": (f'{HEAD}\n{LINE[:-1]}, "opts": ""}}\n', "stands twice"),
    "width": (f"{HEAD}\n{changed(width=0)}\n", "impossible"),
    "width as bool": (f"{HEAD}\n{changed(width=True)}\n", "width"),
    "nan": (f"{HEAD}\n{changed(before=float('nan'))}\n", "impossible"),
    "infinite": (f"{HEAD}\n{changed(before=float('inf'))}\n", "impossible"),
    "slower": (f"{HEAD}\n{changed(before=1.0, after=2.0)}\n", "impossible"),
    "text": (f"{HEAD}\n{changed(before='fast')}\n", "before"),
    "null": (f"{HEAD}\n{changed(opts=None)}\n", "opts"),
    "long number": (f"{HEAD}\n{LINE.replace(': 2,', ': ' + '1' * 6000 + ',')}\n", "line 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name_and_changes_nothing(name: str, tmp_path: Path, cache: Path) -> None:
    content, why = BAD[name]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    x = Tensor([1.0, 2.0])
    for use in (lambda: beam.import_file(str(path)), lambda: tuned_sum(x, path)):
        with pytest.raises(FileFormatError) as error:
            use()
        assert str(path) in error.value.asked and why in str(error.value), str(error.value)
        assert error.value.because and "export" in error.value.fix and len(str(error.value)) < 1500
    assert not (cache / "beam").exists()
    assert x.sum().item() == 3.0


def tuned_sum(x: Tensor, path: Path) -> float:
    clear()
    with Context(TUNED=str(path)):
        return float((x * 2).sum().item())


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        for use in (lambda: beam.import_file(str(path)), lambda: tuned_sum(Tensor([1.0]), path)):
            with pytest.raises(FileFormatError, match="cannot be read"):
                use()
    with pytest.raises(FileFormatError, match="cannot be written"):
        beam.export_file(str(tmp_path / "no" / "folder"))


def test_a_file_of_another_machine(tmp_path: Path) -> None:
    path = write(tmp_path / "tuned", ENTRY._replace(target="cpu-llvm-a64fx-48t"))
    with pytest.raises(FileFormatError, match="a64fx") as error:
        beam.import_file(path)
    assert HERE.split("-")[0] in error.value.because
    with pytest.warns(UserWarning, match="none of its 1 kernels is for this machine"):
        assert tuned_sum(Tensor([1.0, 2.0]), Path(path)) == 6.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_sum(Tensor([1.0, 2.5]), Path(path)) == 7.0  # once


@pytest.mark.parametrize(
    "opts",
    ["UPCAST axis 99 by 2", "UNROLL axis 0 by 2", "UPCAST axis 0 by 999999999", "LOCAL axis 0 by 4",
     "THREAD axis 0 by 2, THREAD axis 1 by 2", "STAGE axis 0 read 7", "PADTO axis 0 to 99999999999"],
)  # fmt: skip
def test_opts_that_do_not_fit_the_kernel_are_left_out(opts: str, tmp_path: Path) -> None:
    """A forged entry cannot do worse than to be ignored."""
    x = np.random.default_rng(0).integers(-4, 5, (24, 16)).astype(np.float32)
    y = np.random.default_rng(1).integers(-4, 5, (16, 32)).astype(np.float32)
    path = write(tmp_path / "tuned", ENTRY._replace(opts=opts))
    clear()
    with Context(TUNED=path):
        assert beam.chosen(AST, "CPU") is None
        tuning.save(ENTRY._replace(opts=opts))
        np.testing.assert_array_equal((Tensor(x) @ Tensor(y)).numpy(), x @ y)
    if opts.startswith("UPCAST"):  # what the disk cache holds is checked as well: a search follows
        with Context(BEAM=1, BEAM_TIME=1):
            assert beam.search(AST, "CPU", 1) != tuning.parse_opts(opts)
    clear()


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    bad.write_text("hello\n")
    assert beam.main(["import", str(bad)]) == 1
    assert str(bad) in capsys.readouterr().err
    tuning.save(ENTRY)
    assert beam.main(["export", str(tmp_path / "good")]) == 0
    assert beam.main(["import", str(tmp_path / "good")]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path / 'good'}: 1 kernels"] * 2


def test_an_entry_under_a_wrong_name_in_the_cache_is_not_exported(tmp_path: Path, cache: Path) -> None:
    tuning.save(ENTRY)
    (file,) = (cache / "beam").iterdir()
    file.rename(file.with_name("0" * 49))
    assert tuning.stored() == [] and tuning.load(AST, HERE) is None
