"""Token files: format, byte tokenizer, choice of files, and never a file in part."""

from __future__ import annotations

import array
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from polyreme.cli.main import main
from polyreme.data.prepare import find_documents, prepare_bytes
from polyreme.data.token_file import TokenFileError, read_info, write_tokens
from polyreme.errors import InvalidArgument

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2] / "python")


def tokens_of(path: Path) -> list[int]:
    """Reads a token file by the letter of the format, without the package."""
    data = path.read_bytes()
    magic, version, item_bytes, num_tokens, _, crc = struct.unpack("<8sIIQQI", data[:36])
    assert magic == b"POLYTOK1"
    assert version == 1
    assert data[36:64] == bytes(28)
    assert len(data) == 64 + num_tokens * item_bytes
    assert zlib.crc32(data[64:]) == crc
    return [int(t) for t in np.frombuffer(data[64:], dtype=f"<u{item_bytes}")]


def make_tree(root: Path) -> None:
    files = {
        "b.txt": b"bb",
        "a/z.py": b"zz",
        "a/y.md": "\u20ac".encode(),
        "a/empty.txt": b"",
        "c/data.bin": b"\x00\x01",
        "c/latin.txt": b"caf\xe9",
        ".git/config": b"hidden",
        "c/.hidden.txt": b"hidden",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "link.txt").symlink_to(root / "b.txt")
    (root / "loop").symlink_to(root)


def test_bytes_become_tokens_and_documents_are_separated(tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    out = tmp_path / "corpus.bin"
    done = prepare_bytes([str(tmp_path / "in")], str(out))
    # Sorted at each level: a/ (y.md, z.py), b.txt, c/ (nothing usable).
    expected = [0xE2, 0x82, 0xAC, 256, 122, 122, 256, 98, 98, 256]
    assert tokens_of(out) == expected
    assert done.train.num_tokens == len(expected)
    assert (done.train.dtype, done.train.vocab_size) == ("uint16", 257)
    assert [os.path.basename(path) for path, _ in done.corpus.documents] == [
        "y.md",
        "z.py",
        "b.txt",
    ]
    assert (done.corpus.skipped_binary, done.corpus.skipped_empty) == (2, 1)
    assert read_info(out, check_payload=True) == done.train
    assert sorted(os.listdir(tmp_path)) == ["corpus.bin", "in"]


def test_same_input_gives_the_same_bytes_also_over_an_older_file(tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    out = tmp_path / "in" / "corpus.bin"  # inside its own input
    first = prepare_bytes([str(tmp_path / "in")], str(out), val_fraction=0.3)
    assert first.val is not None
    files = [Path(first.train.path), Path(first.val.path)]
    before = [file.read_bytes() for file in files]
    second = prepare_bytes([str(tmp_path / "in")], str(out), val_fraction=0.3)
    assert [file.read_bytes() for file in files] == before
    assert second.corpus == first.corpus


def test_include_patterns_and_files_named_by_themselves(tmp_path: Path) -> None:
    make_tree(tmp_path)

    def names(*paths: str, include: tuple[str, ...] = ()) -> list[str]:
        found = find_documents([str(tmp_path / path) for path in paths], include=include)
        return [os.path.relpath(path, tmp_path) for path, _ in found.documents]

    assert names(".", include=("*.py", "*.md")) == ["a/y.md", "a/z.py"]
    assert names(".", include=("a/*",)) == ["a/y.md", "a/z.py"]
    assert names("b.txt", ".", include=("*.py",)) == ["b.txt", "a/z.py"]
    assert names("link.txt", "b.txt", ".") == ["link.txt", "a/y.md", "a/z.py"]  # none twice
    assert names("c/.hidden.txt") == ["c/.hidden.txt"]


def test_document_longer_than_a_chunk(tmp_path: Path) -> None:
    text = ("0123456789\u20ac" * 300000).encode()
    (tmp_path / "long.txt").write_bytes(text)
    out = tmp_path / "corpus.bin"
    prepare_bytes([str(tmp_path / "long.txt")], str(out))
    assert tokens_of(out) == [*text, 256]


def test_odd_byte_behind_the_first_chunk_makes_a_file_binary(tmp_path: Path) -> None:
    (tmp_path / "nul.txt").write_bytes(b"a" * 3000000 + b"\0")
    (tmp_path / "cut.txt").write_bytes(b"a" * 3000000 + b"\xe2\x82")
    (tmp_path / "good.txt").write_bytes(b"a")
    found = find_documents([str(tmp_path)])
    assert (len(found.documents), found.skipped_binary) == (1, 2)


def test_split_takes_whole_documents_about_the_asked_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 2000, 100)
    for index, size in enumerate(sizes):
        (tmp_path / f"{index:03}.txt").write_bytes(bytes([97 + index % 26]) * int(size))
    out = tmp_path / "corpus.bin"
    whole = prepare_bytes([str(tmp_path)], str(out), include=["*.txt"])
    all_tokens = sorted(tokens_of(out))
    done = prepare_bytes([str(tmp_path)], str(out), include=["*.txt"], val_fraction=0.1)
    assert done.val is not None
    share = done.val.num_tokens / whole.train.num_tokens
    assert 0.08 < share < 0.12
    assert sorted(tokens_of(out) + tokens_of(tmp_path / "corpus.val.bin")) == all_tokens
    assert done.num_val_documents == tokens_of(tmp_path / "corpus.val.bin").count(256)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_split_leaves_no_side_empty(tmp_path: Path, num_files: int, fraction: float) -> None:
    for index in range(num_files):
        (tmp_path / f"{index}.txt").write_bytes(b"abcdefghij" * (index + 1))
    done = prepare_bytes([str(tmp_path)], str(tmp_path / "c.bin"), val_fraction=fraction)
    assert done.val is not None
    assert done.train.num_tokens > 1
    assert done.val.num_tokens > 1
    if num_files == 1:
        text = tokens_of(tmp_path / "c.bin")[:-1] + tokens_of(tmp_path / "c.val.bin")[:-1]
        assert bytes(text) == b"abcdefghij"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent", "--out", "c.bin"], "no such file or folder: absent"),
        (["in", "--out", "c.bin", "--include", "*.rs"], "no text files that match *.rs in in"),
        (["in/empty.txt", "--out", "c.bin"], "1 empty"),
        (["in", "--out", "c.bin", "--val-fraction", "0.7"], "validation fraction is 0.7"),
        (["in", "--out", "no/such/c.bin"], "No such file or directory: 'no/such/c.bin'"),
        (["in", "--out", "in"], "Is a directory: 'in'"),
        (["in", "--out", "."], "Is a directory: '.'"),
        (["in", "--out", "in/a.txt/c.bin"], "'in/a.txt/c.bin'"),
    ],
)
def test_errors_name_what_was_given_and_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"a")
    (tmp_path / "in" / "empty.txt").write_bytes(b"")
    assert main(["data", "prepare", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]


def test_write_tokens_takes_arrays_and_buffers(tmp_path: Path) -> None:
    out = tmp_path / "t.bin"
    parts = [
        np.array([[1, 2], [3, 4]], dtype=np.int64),
        b"\x05\x06",
        bytearray(b"\x07"),
        array.array("I", [8, 9]),
        np.array([], dtype=np.float64),
        np.arange(40, dtype=">u2")[10::10],
    ]
    info = write_tokens(out, parts, vocab_size=100)
    assert tokens_of(out) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30]
    assert info.num_tokens == 12


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32"), (1 << 32, "uint32")])
def test_width_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    out = tmp_path / "t.bin"
    info = write_tokens(out, [np.array([0, vocab_size - 1], dtype=np.uint64)], vocab_size)
    assert info.dtype == dtype
    assert tokens_of(out) == [0, vocab_size - 1]
    assert read_info(out, check_payload=True) == info


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (np.array([1, 257]), r"token 257 is not in \[0, 257\)"),
        (np.array([-1, 5]), "token -1 is not"),
        (np.array([1.0]), "type float64"),
        (np.array([], dtype=np.uint8), "no tokens"),
    ],
)
def test_bad_tokens_keep_the_older_file(tmp_path: Path, part: object, words: str) -> None:
    out = tmp_path / "t.bin"
    write_tokens(out, [b"old"], vocab_size=257)
    old = out.read_bytes()
    with pytest.raises(TokenFileError, match=words):
        write_tokens(out, [part], vocab_size=257)
    assert out.read_bytes() == old
    assert os.listdir(tmp_path) == ["t.bin"]


def test_error_of_the_tokenizer_leaves_no_file(tmp_path: Path) -> None:
    def tokens() -> Iterator[bytes]:
        yield b"abc"
        raise RuntimeError("tokenizer")

    with pytest.raises(RuntimeError, match="tokenizer"):
        write_tokens(tmp_path / "t.bin", tokens(), vocab_size=257)
    assert os.listdir(tmp_path) == []


def test_what_is_no_token_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("the only copy")
    for name in ("fifo", "text"):
        with pytest.raises(TokenFileError, match="there and not a token file; it is left as it is"):
            write_tokens(tmp_path / name, [b"abc"], vocab_size=257)
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "text").read_text() == "the only copy"
    assert sorted(os.listdir(tmp_path)) == ["fifo", "text"]


def test_an_empty_file_and_a_token_file_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "t.bin"
    target.touch()
    for text in (b"abc", b"d"):
        write_tokens(target, [text], vocab_size=257)
        assert read_info(target).num_tokens == len(text)


@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
def test_no_document_is_overwritten_by_what_is_made_of_it(tmp_path: Path, val_fraction: float) -> None:
    for name in ("a.txt", "b.val.txt"):
        (tmp_path / name).write_text("the only copy")
    out = "b.txt" if val_fraction else "a.txt"
    with pytest.raises(TokenFileError, match="left as it is: give another path"):
        prepare_bytes([str(tmp_path)], str(tmp_path / out), val_fraction=val_fraction)
    assert all(path.read_text() == "the only copy" for path in tmp_path.iterdir())


def test_the_header_of_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(TokenFileError, match="not a regular file"):
        read_info(tmp_path / "fifo")


def test_a_token_file_error_is_an_invalid_argument(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not a token file"):
        read_info(__file__)


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    earlier = os.umask(0o027)
    try:
        write_tokens(tmp_path / "t.bin", [b"abc"], vocab_size=257)
    finally:
        os.umask(earlier)
    assert (tmp_path / "t.bin").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("size", [0, 10, 63, 64, 69])
def test_f68_cut_file_is_refused(tmp_path: Path, size: int) -> None:
    out = tmp_path / "t.bin"
    write_tokens(out, [b"abc"], vocab_size=257)
    os.truncate(out, size)
    with pytest.raises(TokenFileError, match=r"t\.bin"):
        read_info(out)


def test_f69_flipped_bit_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.bin"
    write_tokens(out, [b"abc"], vocab_size=257)
    assert main(["data", "info", str(out), "--check"]) == 0
    assert "3 tokens of uint16, vocabulary 257" in capsys.readouterr().out
    data = bytearray(out.read_bytes())
    data[66] ^= 1
    out.write_bytes(data)
    read_info(out)
    assert main(["data", "info", str(out), "--check"]) == 2
    assert "damaged" in capsys.readouterr().err


def test_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path / "in")
    out = str(tmp_path / "c.bin")
    assert main(["data", "prepare", str(tmp_path / "in"), "--out", out, "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert printed.err == ""
    assert result["train"]["num_tokens"] == 10
    assert (result["num_files"], result["skipped_binary"]) == (3, 2)
    assert main(["data", "info", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result["train"]


def test_terminated_command_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"a" * 1000)
    (tmp_path / "out").mkdir()
    slow_disk = (
        "import sys, time\n"
        "from polyreme.cli.main import main\n"
        "from polyreme.data import prepare\n"
        "tokens = prepare._byte_tokens\n"
        "prepare._byte_tokens = lambda *a: (time.sleep(1000) or part for part in tokens(*a))\n"
        "sys.exit(main(['data', 'prepare', 'in', '--out', 'out/c.bin']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow_disk],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while not os.listdir(tmp_path / "out"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert os.listdir(tmp_path / "out") != ["c.bin"]  # not under its name before it is whole
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert os.listdir(tmp_path / "out") == []
