"""Text extraction by several worker processes and by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from bertrain.data.text.extract import extract
from tests.miniature_tasks import command_line
from tests.quick.test_extract import DUMP, SAMPLE, documents_of


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "cut.xml").write_bytes(DUMP[:-1000])
    done = command_line("data", "extract", tmp_path / "cut.xml", "--out", tmp_path / "out", check=False)
    assert (done.code, done.out) == (2, "")
    for named in ("[damaged-input]", "cut.xml", "page 7", "--on-error skip"):
        assert named in done.err
    assert not (tmp_path / "out").exists()
    arguments = ("--on-error", "skip", "--hold-out", 1, "--json")
    done = command_line("data", "extract", tmp_path / "cut.xml", "--out", tmp_path / "out", *arguments)
    made = json.loads(done.out)
    assert made == json.loads((tmp_path / "out" / "extract.json").read_text())
    assert made["counts"]["documents"] == 4
    assert made["skipped"]["damaged"] == 1
    assert made["counts"]["held_out"] == len(documents_of((tmp_path / "out" / "eval.txt").read_text())) == 1


def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sentence {n} is here. And {'more ' * 200}.\n\n" for n in range(2000)))
    for workers in (1, 2):
        extract([SAMPLE, text], tmp_path / str(workers), workers=workers, hold_out=20, part_bytes=500_000)
    one, two = ([path for path in sorted((tmp_path / n).rglob("*")) if path.is_file()] for n in "12")
    assert len(one) == len(two) == 7
    for first, second in zip(one, two, strict=True):
        assert first.relative_to(tmp_path / "1") == second.relative_to(tmp_path / "2")
        assert first.read_bytes() == second.read_bytes()


READ = """
import sys
from pathlib import Path
import pyarrow.parquet
from bertrain.data.text.records import Reading, Record, read_records
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
before = peak()
found = read_records(Path(sys.argv[1]), Reading("auto", "auto", "text"), lambda _: None, [], skip_binary=False)
print(sum(isinstance(record, Record) for record in found), peak() - before)
"""


@pytest.mark.parametrize("name", ["train-00000-of-00001.parquet", "data-00000-of-00001.arrow"])
def test_a_large_table_is_not_read_whole(tmp_path: Path, name: str) -> None:
    """One row group of 192 MiB, as some writers make them; `datasets` writes Arrow in batches of 1,000 rows."""
    path, num_rows = tmp_path / name, 96_000
    rows = [f"{number:08} " + "some words that are not compressed " * 60 for number in range(num_rows)]
    table = pa.table({"text": rows, "other": ["beside it"] * num_rows})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=num_rows, compression="none", use_dictionary=False)
        assert pyarrow.parquet.ParquetFile(path).num_row_groups == 1
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    size = path.stat().st_size
    assert size > 180 << 20
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    found, grown = map(int, done.stdout.split())
    assert found == num_rows
    assert grown < size / 3, f"{grown >> 20} MiB for a file of {size >> 20} MiB"
