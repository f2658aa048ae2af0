"""`bertrain data download`: large files over HTTP, verified.

A file is downloaded under a hidden name, resumed after an interruption, also by a later run, and renamed when its
MD5 is correct.
"""

from __future__ import annotations

import http.client
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest, writing
from bertrain.config.choices import Collection
from bertrain.data.text.progress import progress

WIKIMEDIA = "https://dumps.wikimedia.org"
MLCOMMONS = "https://training.mlcommons-storage.org"

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 120.0
ATTEMPTS_WITHOUT_PROGRESS = 8
TIMEOUT_S = 60.0

_RETRIED = (408, 429, 500, 502, 503, 504)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch: its path under the output folder, URL and checksum."""

    place: str
    url: str
    md5: str


# Bytes and MD5 that MLPerf's reference publishes (mlcommons/training, retired_benchmarks/bert/README.md).
MLPERF_FILES = {
    "bert_config.json": (314, "7f59165e21b7d566db610ff6756c926b"),
    "vocab.txt": (231_508, "64800d5d8528ce344256daf115d4965e"),
    "tf1_ckpt/model.ckpt-28252.index": (17_371, "f97de3ae180eb8d479555c939d50d048"),
    "tf1_ckpt/model.ckpt-28252.meta": (24_740_228, "dbd16c731e8a8113bc08eeed0326b8e7"),
    "tf1_ckpt/model.ckpt-28252.data-00000-of-00001": (4_034_713_312, "50797acd537880bfb5a7ade80d976129"),
    "eval.txt": (32_851_144, "2a220f790517261547b1b45ed3ada07a"),
    "eval.md5": (330_000, "71a58382a68947e93e88aa0d42431b6c"),
    "part-00000-of-00500": (27_150_902, "a64a7c31eff5cd38ae6d94f7a6229dab"),
    "part-00001-of-00500": (27_198_569, "549a9ed4f805257245bec936563abfd0"),
    "part-00002-of-00500": (27_395_616, "1a1366ddfc03aef9d41ce552ee247abf"),
    "part-00497-of-00500": (24_775_043, "66835aa75d4855f2e678e8f3d73812e9"),
    "part-00498-of-00500": (24_575_505, "e6d68a7632e9f4aa1a94128cce556dc9"),
    "part-00499-of-00500": (21_873_644, "b3b087ad24e3770d879a351664cebc5a"),
}


def download(
    what: Collection, out: str | Path, *, mirror: str | None = None, language: str = "en", date: str = "latest"
) -> dict[str, Any]:
    """Fetch the newest Wikipedia dump of a language, or MLPerf's text, checkpoint, configuration and vocabulary.

    `mirror` replaces the host in every URL. Files already in `out` are verified, not fetched again. Returns the names
    of files fetched, already there, and left out.
    """
    if what == "mlperf" and (language, date) != ("en", "latest"):
        raise UserError("option-without-effect", "--language and --date are for wikipedia; leave them out")
    out = Path(out)
    left_out: list[str] = []
    if what == "wikipedia":
        files = wikipedia_files(mirror or WIKIMEDIA, language, date)
    else:
        files, left_out = mlperf_files(mirror or MLCOMMONS)
    fetched = [file.place for file in files if fetch(file, out)]
    there = [file.place for file in files if file.place not in fetched]
    return {"out": str(out), "fetched": fetched, "already_there": there, "left_out": left_out}


def wikipedia_files(host: str, language: str, date: str) -> list[RemoteFile]:
    """The dump of articles, found in the list of checksums that Wikimedia publishes; "latest" becomes a date."""
    wiki = f"{language.replace('-', '_')}wiki"
    sums = f"{host.rstrip('/')}/{wiki}/{date}/{wiki}-{date}-md5sums.txt"
    for md5, name in parse_checksums(_read_text(sums), sums):
        found = re.fullmatch(rf"{re.escape(wiki)}-(\d{{8}})-pages-articles-multistream\.xml\.bz2", name)
        if found:
            return [RemoteFile(name, f"{host.rstrip('/')}/{wiki}/{found.group(1)}/{name}", md5)]
    raise UserError("missing-dump", f"{sums} does not list a dump of articles yet; choose another --date")


def mlperf_files(host: str) -> tuple[list[RemoteFile], list[str]]:
    """MLPerf's files by MLCommons' manifests, in the folders of NVIDIA's prepare_data; and files not needed.

    A manifest is a pair: NAME.uri holds the address of a folder, NAME.md5 lists its files.
    """
    files, left_out = [], []
    for manifest, folder in (("bert-input-files", "phase1"), ("bert-preprocessed-wikipedia-dataset", "download")):
        base = _read_text(f"{host.rstrip('/')}/metadata/{manifest}.uri").strip()
        base = f"{host.rstrip('/')}{urlsplit(base).path.rstrip('/')}/"
        listed = f"{host.rstrip('/')}/metadata/{manifest}.md5"
        for md5, name in parse_checksums(_read_text(listed), listed):
            if folder == "phase1" and (name.startswith("enwiki-") or "tf2_ckpt" in name):
                left_out.append(name)
                continue
            place = f"{folder}/{PurePosixPath(name).name if folder == 'phase1' else name}"
            _refuse_other_file(name, md5)
            files.append(RemoteFile(place, urljoin(base, name), md5))
    return files, left_out


def _refuse_other_file(name: str, md5: str) -> None:
    """Refuse a file for which the manifest gives another checksum than the published one."""
    for known, (_, published) in MLPERF_FILES.items():
        if md5 != published and (name == known or name.endswith(f"/{known}")):
            raise UserError(
                "wrong-checksum", f"the manifest gives {name} the MD5 {md5}, not {published}; check --mirror"
            )


def parse_checksums(text: str, place: str) -> list[tuple[str, str]]:
    """(MD5, name) of each line of an md5sum file, which is at `place`."""
    listed = re.findall(r"^([0-9a-fA-F]{32})[ \t]+\*?(?:\./)?(\S.*?)\s*$", text, re.MULTILINE)
    if not listed:
        raise UserError("bad-checksum-list", f"{place} has no checksums in it; check --mirror and --date")
    for _, name in listed:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError("bad-checksum-list", f"{place} lists a file outside its folder: {name}")
    return [(md5.lower(), name) for md5, name in listed]


def _read_text(url: str) -> str:
    content = BytesIO()
    _receive(url, content)
    return content.getvalue().decode(errors="replace")


def fetch(file: RemoteFile, out: Path) -> bool:
    """Fetch and verify `file`; returns False if it was already there."""
    place = out / file.place
    if place.exists():
        if not _is_right(place, file):
            raise UserError("wrong-checksum", f"{place} differs from {file.url} (MD5); remove it to download it again")
        return False
    partial = place.with_name(f".{place.name}.partial")
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    is_resumed = partial.stat().st_size > 0
    with progress(file.place) as report, open(partial, "r+b") as sink:
        _receive(file.url, sink, report)
        if is_resumed and not _is_right(partial, file):  # the beginning may be of an older version, or damaged
            sink.truncate(0)
            _receive(file.url, sink, report)
    if not _is_right(partial, file):
        partial.unlink()
        raise UserError("wrong-checksum", f"the download of {file.url} does not have the MD5 {file.md5}; try again")
    partial.rename(place)
    return True


def _is_right(path: Path, file: RemoteFile) -> bool:
    return file_digest(path, "md5")[1] == file.md5


def _receive(url: str, sink: IO[bytes], report: Callable[..., None] = lambda done, of: None) -> None:
    """Append the missing rest; retry until it works, give up after several attempts without progress."""
    failures = 0
    while True:
        have = sink.seek(0, os.SEEK_END)
        try:
            return _append(url, sink, have, report)
        except urllib.error.HTTPError as error:
            if error.code not in _RETRIED:
                raise UserError("http-error", f"{url}: HTTP {error.code} {error.reason}; check the URL") from None
            what = f"HTTP {error.code} {error.reason}"
        except (http.client.InvalidURL, ValueError) as error:  # an HTTPException, but permanent
            raise UserError("bad-url", f"{url} is not a URL that can be downloaded ({error}); check --mirror") from None
        except (OSError, http.client.HTTPException) as error:
            what = str(getattr(error, "reason", error)) or type(error).__name__
        failures = 0 if sink.seek(0, os.SEEK_END) > have else failures + 1
        if failures == ATTEMPTS_WITHOUT_PROGRESS:
            raise UserError(
                "download-failed", f"{url} failed {failures} times ({what}); run the same command to resume"
            )
        seconds = min(FIRST_WAIT_S * 2**failures, LONGEST_WAIT_S)
        print(f"{url}: {what}; retrying in {seconds:.0f} s", file=sys.stderr, flush=True)
        time.sleep(seconds)


def _append(url: str, sink: IO[bytes], have: int, report: Callable[..., None]) -> None:
    """Request the bytes from `have` on and write them; a server may ignore the range and send the whole file."""
    if urlsplit(url).scheme not in ("http", "https"):  # urllib would open files of this machine too
        raise UserError("bad-url", f"{url} is not a URL that can be downloaded; it must begin with https:// or http://")
    headers = {"User-Agent": "bertrain"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if have and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the server's file is not longer; whether it is this one, its checksum shows
        raise
    with response:
        start, expected = have if response.status == HTTPStatus.PARTIAL_CONTENT else 0, response.length
        sink.seek(start)
        sink.truncate()
        while block := response.read(_BLOCK):
            with writing(getattr(sink, "name", url)):  # a full disk is not a bad connection
                sink.write(block)
                sink.flush()
            report(sink.tell(), 0 if expected is None else start + expected)
        if expected is not None and sink.tell() - start < expected:
            raise http.client.IncompleteRead(b"", start + expected - sink.tell())
