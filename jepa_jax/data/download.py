"""Downloads a file: resumes, verifies, and renames it to its final name only when it is complete."""

import dataclasses
import http.client
import os
import pathlib
import urllib.error
import urllib.request
from collections.abc import Callable

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import file_digest

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30
Progress = Callable[[int, int], None]  # called with the bytes so far and in total


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file on a server, with the size and checksum of its content."""

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def download(
    remote: RemoteFile, directory: pathlib.Path, progress: Progress = lambda done, total: None
) -> pathlib.Path:
    """Returns the verified file in `directory`, downloaded unless present, from where an earlier attempt stopped."""
    target = directory / remote.name
    if target.exists():
        if target.stat().st_size == remote.size and file_digest(target, "md5") == remote.md5:
            return target
        raise UserError(
            f"{target}: exists but is not the official file (size or md5 differ); move it away and try again"
        )
    part = directory / f"{remote.name}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _fetch(remote, part, progress)
        if part.stat().st_size < remote.size:
            done = part.stat().st_size
            raise UserError(
                f"{remote.url}: the connection ended after {done:,} of {remote.size:,} bytes; "
                "run the same command again to go on from there"
            )
        if part.stat().st_size > remote.size or file_digest(part, "md5") != remote.md5:
            part.unlink()
            raise UserError(
                f"{remote.url}: the content is not the official file (size or md5 differ) and was deleted; "
                f"try again, or {by_hand(remote, directory)}"
            )
        os.replace(part, target)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{remote.url}: cannot be downloaded ({reason}); {by_hand(remote, directory)}") from error
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror or error}); choose another --dir") from error
    return target


def by_hand(remote: RemoteFile, directory: pathlib.Path) -> str:
    """Returns what to do on a machine without a network."""
    return (
        f"fetch {remote.url} ({remote.size:,} bytes, md5 {remote.md5}) on another machine and put it at "
        f"{directory / remote.name}"
    )


def _fetch(remote: RemoteFile, part: pathlib.Path, progress: Progress) -> None:
    """Appends the missing bytes to `part`; starts over if the server does not support ranges."""
    done = part.stat().st_size if part.exists() else 0
    if done == remote.size:
        return
    if done > remote.size:
        done = 0
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        with part.open("ab" if resumed else "wb") as file:
            done = done if resumed else 0
            progress(done, remote.size)
            # One byte more than expected is enough to know that the content is wrong.
            while done <= remote.size and (chunk := response.read1(CHUNK_BYTES)):
                file.write(chunk)
                done += len(chunk)
                progress(done, remote.size)
