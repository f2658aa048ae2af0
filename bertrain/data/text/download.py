"""`bertrain data download`: large files over HTTP that arrive whole or not at all.

A file grows under a hidden name beside its place, goes on from there after a break, even in a later run, and gets its
name when length and checksum are right.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from bertrain.base.errors import UserError
from bertrain.config.choices import Collection
from bertrain.data.text.progress import progress

WIKIMEDIA = "https://dumps.wikimedia.org"
MLCOMMONS = "https://training.mlcommons-storage.org"

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 120.0
ATTEMPTS_WITHOUT_PROGRESS = 8
TIMEOUT_S = 60.0

_WORTH_ANOTHER_TRY = (408, 429, 500, 502, 503, 504)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch, its place under the output folder, and what is known of it."""

    place: str
    url: str
    md5: str
    size: int | None = None


# What MLPerf's reference publishes of its files (mlcommons/training, retired_benchmarks/bert/README.md): bytes, MD5.
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

    `mirror` takes the place of the host in every address. Files already at `out` are verified and not fetched again.
    Returns what was fetched, what was there and what was left out.
    """
    out = Path(out)
    left_out: list[str] = []
    if what == "wikipedia":
        files = wikipedia_files(mirror or WIKIMEDIA, language, date)
    else:
        files, left_out = mlperf_files(mirror or MLCOMMONS)
    fetched = [file.place for file in files if fetch(file, out)]
    there = [file.place for file in files if file.place not in fetched]
    return {"out": str(out), "fetched": fetched, "already_there": there, "left_out": left_out}


# --- what there is to fetch -----------------------------------------------------------------------------------


def wikipedia_files(host: str, language: str, date: str) -> list[RemoteFile]:
    """The one dump of articles, by the checksums that Wikimedia publishes beside it; "latest" becomes a date."""
    wiki = f"{language.replace('-', '_')}wiki"
    sums = f"{host.rstrip('/')}/{wiki}/{date}/{wiki}-{date}-md5sums.txt"
    for md5, name in _read_checksums(sums):
        found = re.fullmatch(rf"{re.escape(wiki)}-(\d{{8}})-pages-articles-multistream\.xml\.bz2", name)
        if found:
            return [RemoteFile(name, f"{host.rstrip('/')}/{wiki}/{found.group(1)}/{name}", md5)]
    raise UserError(f"{sums} lists no dump of articles yet; choose another --date")


def mlperf_files(host: str) -> tuple[list[RemoteFile], list[str]]:
    """MLPerf's files by MLCommons' manifests, into the folders of NVIDIA's prepare_data; and what is not needed.

    A manifest is a pair: NAME.uri holds the address of a folder, NAME.md5 lists its files.
    """
    files, left_out = [], []
    for manifest, folder in (("bert-input-files", "phase1"), ("bert-preprocessed-wikipedia-dataset", "download")):
        base = _read_text(f"{host.rstrip('/')}/metadata/{manifest}.uri").strip()
        base = f"{host.rstrip('/')}{urlsplit(base).path.rstrip('/')}/"
        for md5, name in _read_checksums(f"{host.rstrip('/')}/metadata/{manifest}.md5"):
            if folder == "phase1" and (name.startswith("enwiki-") or "tf2_ckpt" in name):
                left_out.append(name)
                continue
            place = f"{folder}/{PurePosixPath(name).name if folder == 'phase1' else name}"
            files.append(RemoteFile(place, urljoin(base, name), md5, _known_size(name, md5)))
    return files, left_out


def _known_size(name: str, md5: str) -> int | None:
    """The published size of a file, whose published checksum must be the manifest's."""
    for known, (size, published) in MLPERF_FILES.items():
        if name == known or name.endswith(f"/{known}"):
            if md5 != published:
                raise UserError(f"the manifest gives {name} the MD5 {md5}, but MLPerf published {published}")
            return size
    return None


def _read_checksums(url: str) -> list[tuple[str, str]]:
    """(MD5, name) of each line that md5sum wrote."""
    listed = re.findall(r"^([0-9a-fA-F]{32})[ \t]+\*?(?:\./)?(\S.*?)\s*$", _read_text(url), re.MULTILINE)
    if not listed:
        raise UserError(f"{url} lists no checksum; is the address right?")
    for _, name in listed:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{url} lists a file outside of its folder: {name}")
    return [(md5.lower(), name) for md5, name in listed]


def _read_text(url: str) -> str:
    def read(_: int) -> str:
        with _open(url, 0) as response:
            return str(response.read().decode("utf-8", errors="replace"))

    return str(_persistently(url, read, lambda: 0))


# --- fetching -------------------------------------------------------------------------------------------------


def fetch(file: RemoteFile, out: Path) -> bool:
    """Make `file` be at its place under `out`, verified; False if it was there already."""
    place = out / file.place
    if place.exists():
        if not _is_right(place, file):
            raise UserError(f"{place} is not the file that {file.url} should be (length or MD5); remove it to fetch it")
        return False
    partial = place.with_name(f".{place.name}.partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise UserError(f"cannot write {place}: {error.strerror or error}") from None
    went_on = partial.stat().st_size > 0
    _complete(file, partial)
    if went_on and not _is_right(partial, file):  # the beginning may be of an older version, or of a bad disk
        partial.write_bytes(b"")
        _complete(file, partial)
    if not _is_right(partial, file):
        partial.unlink()
        raise UserError(f"what {file.url} sent has another length or MD5 than {file.md5}; nothing of it was kept")
    partial.rename(place)
    return True


def _is_right(path: Path, file: RemoteFile) -> bool:
    if file.size is not None and path.stat().st_size != file.size:
        return False
    return md5_of(path) == file.md5


def md5_of(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def _complete(file: RemoteFile, partial: Path) -> None:
    """Fetch what is still missing of `partial`, through as many breaks as make progress."""

    def size() -> int:
        return partial.stat().st_size

    with progress(file.place, file.size or 0) as tell, open(partial, "r+b") as sink:

        def attempt(have: int) -> None:
            if file.size is not None and have >= file.size:
                sink.truncate(file.size)
                return
            with _open_from(file.url, have, sink) as response:
                start, total = _extent(response, have)
                if file.size is not None and total not in (None, file.size):
                    raise UserError(f"{file.url} has {total:,} bytes, but {file.size:,} are expected")
                sink.seek(start)
                sink.truncate()
                _copy(response, sink, tell)
                if total is not None and size() < total:
                    raise http.client.IncompleteRead(b"", total - size())

        _persistently(file.url, attempt, size)


def _copy(response: Any, sink: IO[bytes], tell: Callable[[int], None]) -> None:
    while block := response.read(_BLOCK):
        try:
            sink.write(block)
            sink.flush()
        except OSError as error:  # a full disk is not a bad connection
            raise UserError(f"cannot write {sink.name}: {error.strerror or error}; run again to go on") from None
        tell(sink.tell())


def _open(url: str, have: int) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):  # urllib would open files of this machine too
        raise UserError(f"{url} is not an address that can be fetched; begin it with https://")
    headers = {"User-Agent": "bertrain"} | ({"Range": f"bytes={have}-"} if have else {})
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)


def _open_from(url: str, have: int, sink: IO[bytes]) -> Any:
    """The answer from byte `have` on; from the beginning if the server has not so many bytes."""
    try:
        return _open(url, have)
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        sink.truncate(0)
        return _open(url, 0)


def _extent(response: Any, have: int) -> tuple[int, int | None]:
    """Where the answer begins in the file, and how long the file is; a server may ignore the request for a part."""
    if response.status == HTTPStatus.PARTIAL_CONTENT:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if found and int(found.group(1)) <= have:
            return int(found.group(1)), None if found.group(2) == "*" else int(found.group(2))
        raise http.client.HTTPException(f"a part that was not asked for: {response.headers.get('Content-Range')}")
    length = response.headers.get("Content-Length")
    return 0, int(length) if length else None


def _persistently(url: str, attempt: Callable[[int], Any], progress_made: Callable[[], int]) -> Any:
    """Try until it works; give up at what no repetition mends, or after so many tries that brought no byte."""
    in_vain = 0
    while True:
        have = progress_made()
        try:
            return attempt(have)
        except urllib.error.HTTPError as error:
            if error.code in _WORTH_ANOTHER_TRY:
                what, wait = f"HTTP {error.code} {error.reason}", _retry_after(error.headers.get("Retry-After"))
            else:
                raise UserError(f"{url} answers HTTP {error.code} {error.reason}; is the address right?") from None
        except http.client.InvalidURL as error:  # an HTTPException, but no repetition mends it
            raise UserError(f"{url} is not an address that can be fetched ({error})") from None
        except (OSError, http.client.HTTPException) as error:
            what, wait = str(getattr(error, "reason", error)) or type(error).__name__, None
        except ValueError as error:
            raise UserError(f"{url} is not an address that can be fetched ({error})") from None
        in_vain = 0 if progress_made() > have else in_vain + 1
        if in_vain == ATTEMPTS_WITHOUT_PROGRESS:
            raise UserError(f"gave up on {url} after {in_vain} tries in vain ({what}); run again to go on from there")
        seconds = min(FIRST_WAIT_S * 2**in_vain if wait is None else wait, LONGEST_WAIT_S)
        print(f"{url}: {what}; trying again in {seconds:.0f} s", file=sys.stderr, flush=True)
        time.sleep(seconds)


def _retry_after(header: str | None) -> float | None:
    return float(header) if header and header.isdecimal() else None
