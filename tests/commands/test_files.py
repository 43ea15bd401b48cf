"""What commands write: never over what they read, never twice, and whole or not at all."""

import os
import pathlib
import subprocess
import sys

import onnx
import pytest
from click.testing import CliRunner, Result

from onnxamp import files
from onnxamp.cli import cli
from onnxamp.errors import UsageError


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The working folder, with a model in it under two names."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2,2] x) => (float[2,2] y) { y = MatMul(x, x) }'
    )
    onnx.save(model, tmp_path / "m.onnx")
    os.link(tmp_path / "m.onnx", tmp_path / "hard.onnx")
    (tmp_path / "soft.json").symlink_to("m.onnx")
    (tmp_path / "p.toml").write_text("[nodes]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(command: str) -> Result:
    return CliRunner().invoke(cli, command.split(), catch_exceptions=True)


@pytest.mark.parametrize(
    "command",
    [
        "convert m.onnx -o m.onnx --force",
        "convert m.onnx -o ./m.onnx --force --verify",
        "convert m.onnx -o hard.onnx --force",
        "convert m.onnx -o x.json --report x.json",
        "convert m.onnx -o x.onnx --report x.json --report ./x.json",
        "convert m.onnx -o x.onnx --report soft.json --force",
        "convert m.onnx -o p.toml --policy p.toml --plan-only --force",
        "convert m.onnx -o x.onnx --report nodir/x.json",
        "convert m.onnx -o nodir/x.onnx",
        "convert m.onnx -o x.onnx --report .html",
        "diff m.onnx p.toml -o m.onnx --force",
        "diff p.toml m.onnx -o m.onnx --force",
        "diff m.onnx m.onnx -o nodir/d.json",
        "emulate m.onnx -o m.onnx --force",
        "grad m.onnx -o m.onnx --force",
        "replace-head m.onnx 3 -o m.onnx --force",
        "verify m.onnx m.onnx --report soft.json --force",
        "verify m.onnx m.onnx --seed -1",
        "verify m.onnx m.onnx --tolerance cosine=nan",
        "verify m.onnx m.onnx --tolerance snr=-inf",
    ],
)
def test_what_cannot_be_written_is_refused_first(folder: pathlib.Path, command: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = invoke(command)
    assert isinstance(result.exception, UsageError) or result.exit_code == 2, result
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_link_is_replaced_and_what_it_links_to_stays(folder: pathlib.Path) -> None:
    (folder / "old.onnx").write_bytes(b"old")
    (folder / "link.onnx").symlink_to("old.onnx")
    assert invoke("convert m.onnx -o link.onnx --force").exit_code == 0
    assert not (folder / "link.onnx").is_symlink()
    assert (folder / "old.onnx").read_bytes() == b"old"


def test_a_full_disk_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    code = f"""
import resource, signal
from onnxamp.commands._options import write_text
from onnxamp.errors import RuntimeMissingError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_text({str(path)!r}, "new" * 1000)
except RuntimeMissingError as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_the_mode_of_a_new_one(tmp_path: pathlib.Path) -> None:
    old = os.umask(0o027)
    try:
        files.write(tmp_path / "f", b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_a_device_is_written_to_and_stays_one(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write(pipe, b"text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["convert", "--help"]])
def test_output_that_nobody_reads(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "onnxamp", *arguments], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
