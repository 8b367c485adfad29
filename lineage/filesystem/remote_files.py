"""Files on servers: reachability of an HTTP server, versions and content of remote files, a private folder."""

import base64
import contextlib
import inspect
import os
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from glob import has_magic
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_of
from lineage.filesystem.files import URL
from lineage.secrets import first_line, secrets_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def why_unreachable(url: str, timeout_seconds: float) -> Exception | None:
    """Why ``<url>/health`` is unreachable; None: a server answers, even if it denies access."""
    try:
        urllib.request.urlopen(request(f"{url.rstrip('/')}/health"), timeout=timeout_seconds).close()
    except urllib.error.HTTPError:
        return None  # the client reports a denied access
    except (OSError, ValueError, HTTPException) as error:
        return error
    return None


def request(url: str) -> urllib.request.Request:
    """A request to a URL that may contain a user name and password, which urllib does not support."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {"Authorization": basic(unquote(user))} if user else {}
    return urllib.request.Request(urlunsplit(parts._replace(netloc=host)), headers=headers)


def basic(pair: str) -> str:
    """Value of the basic authorization header for ``user:password``."""
    return "Basic " + base64.b64encode(pair.encode()).decode()


def private_folder(parent: str | None = None) -> Path:
    """``posttrain-UID`` in the temporary directory, with mode 0700, shared by all processes of this user.

    If another user has taken that name, a directory with a random suffix, which later calls find again.

    Args:
        parent: directory to create it in, instead of the temporary directory.
    """
    place, name = Path(parent or tempfile.gettempdir()), f"posttrain-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        (place / name).mkdir(mode=0o700)
    own = sorted(path for path in place.glob(f"{name}*") if _is_own(path))
    return own[0] if own else Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))


def dvc_state() -> str:
    """Folder for DVC's pickled repository state; DVC's default below ``/var/tmp`` is writable by everyone."""
    return str(private_folder() / "dvc")


def _is_own(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # deleted by another user meanwhile
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


Credentials = Mapping[str, str]  # option of a file system in fsspec -> the environment variable that holds it

_NONE: Credentials = MappingProxyType({})
_WEB = ("http://", "https://")
REGION = "region"  # of an S3 bucket, an option of ours
_DVC = "dvc://"  # a path tracked by DVC in the repository of this folder, at its last commit
# Attributes that change with the content; without any, the modification time is used.
_OF_CONTENT = ("md5", "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id", "generation")
_OF_TIME = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modified", "created")


def is_url(path: str) -> bool:
    """Whether a source's path is a URL for fsspec."""
    return bool(URL.match(path))


def remote_versions(name: str, url: str, credentials: Credentials = _NONE) -> dict[str, str]:
    """URL -> version of every file that a URL of a file, directory or glob names, in order. Downloads nothing.

    Args:
        name: of the source, for messages.

    Raises:
        ConfigError: the URL is missing or unreachable, its file system is not installed or has no versions, or a
            variable of ``credentials`` is not set.
    """
    try:
        with file_system(url, credentials) as (files, path):
            files.invalidate_cache()
            found = _listed(files, path)
            attributes = {place: _attributes(files, place, found[place]) for place in sorted(found)}
            versions = {
                files.unstrip_protocol(place): _version(name, place, each)
                for place, each in attributes.items()
                if each["type"] == "file"
            }
    except ConfigError as error:
        raise ConfigError(f"sources.{name}.{error}") from error
    except Exception as error:  # of a file system's own library: no common base
        raise _unreachable(name, url, first_line(error, credentials)) from error
    if not versions:
        raise ConfigError(
            f"sources.{name}.path={url}: no file there, or its server does not answer; "
            "give the URL of a file, a directory or a glob"
        )
    return versions


def revision_of(versions: dict[str, str]) -> str:
    """Digest of the versions of files in their order; file names do not matter."""
    return digest_of({str(place): version for place, version in enumerate(versions.values())})


def place_of(url: str) -> PurePosixPath:
    """The path of a URL without the scheme, and for HTTP without the query."""
    place = url.partition("://")[2]
    if url.startswith(_WEB):
        place = urlsplit(url).netloc + urlsplit(url).path
    return PurePosixPath(place.lstrip("/"))


@contextlib.contextmanager
def open_remote(url: str, credentials: Credentials = _NONE) -> Iterator[IO[bytes]]:
    """Opens a remote file for reading."""
    with file_system(url, credentials) as (files, path), files.open(path, "rb") as file:
        yield file


@contextlib.contextmanager
def file_system(url: str, credentials: Credentials = _NONE) -> Iterator[tuple["AbstractFileSystem", str]]:
    """The file system of a URL, and the path in it."""
    from fsspec.core import get_filesystem_class, url_to_fs

    if credentials:
        _require_options(get_filesystem_class(url.partition("://")[0]), credentials)
    # Reads the committed version, not the working tree, which has no version.
    configured: dict[str, object] = {"rev": "HEAD"} if url.startswith(_DVC) else {}
    if url.startswith("file://"):
        configured["auto_mkdir"] = True  # as in a bucket
    secrets: dict[str, object] = dict(secrets_of(credentials))
    if REGION in secrets:  # s3fs passes it on to botocore alone
        secrets["client_kwargs"] = {"region_name": secrets.pop(REGION)}
    if secrets and url.startswith(_WEB):
        secrets = {"client_kwargs": {"headers": {"Authorization": _authorization(secrets)}}}
    if configured:
        os.environ.setdefault("DVC_SITE_CACHE_DIR", dvc_state())  # DVC reads it when it opens the repository
    files, path = url_to_fs(url, **configured, **secrets)
    try:
        yield files, path
    finally:
        if url.startswith(_DVC):  # holds a repository open; other file systems are shared
            files.close()


def _authorization(secrets: Mapping[str, object]) -> str:
    """Value of the authorization header for a web server."""
    pair = f"{secrets.get('username', '')}:{secrets.get('password', '')}"
    return f"Bearer {secrets['token']}" if "token" in secrets else basic(pair)


def _require_options(kind: "type[AbstractFileSystem]", credentials: Credentials) -> None:
    """Checks that the file system has these options: it would silently ignore others."""
    accepted = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "args", "kwargs")]
    accepted = ["username", "password", "token"] if "https" in kind.protocol else accepted
    accepted += [REGION] if "s3" in kind.protocol else []
    for option in credentials:
        if option not in accepted:
            raise ConfigError(
                f"credentials.{option}: {kind.__name__} has no such option; accepted: {', '.join(accepted) or 'none'}; "
                "rename or remove it"
            )


def _listed(files: "AbstractFileSystem", path: str) -> Mapping[str, Mapping[str, object]]:
    """Path -> attributes of all files that a path names."""
    if has_magic(path):
        return dict(files.glob(path, detail=True))
    # First as a file: to list a path, fsspec's HTTP reads it as a web page with links.
    with contextlib.suppress(FileNotFoundError):
        itself = files.info(path)
        if itself["type"] == "file" and not path.endswith("/"):
            return {path: itself}
    return dict(files.find(path, detail=True))


def _attributes(files: "AbstractFileSystem", place: str, listed: Mapping[str, object]) -> Mapping[str, object]:
    """The attributes of one file; a listing may lack the versions: HTTP's has only names."""
    if listed["type"] == "file" and not any(listed.get(key) for key in (*_OF_CONTENT, *_OF_TIME)):
        return {**listed, **files.info(place)}
    return listed


def _version(name: str, place: str, attributes: Mapping[str, object]) -> str:
    for keys in (_OF_CONTENT, _OF_TIME):
        version = {key: str(attributes[key]) for key in keys if attributes.get(key)}
        if version:
            return digest_of({**version, "size": str(attributes.get("size"))})
    raise ConfigError(
        f"sources.{name}.path: {place} has neither a checksum nor a time of change there, so that no change would be "
        "noticed; copy it to a file or a bucket, and give that"
    )


def _unreachable(name: str, url: str, cause: str) -> ConfigError:
    return ConfigError(
        f"sources.{name}.path={url}: cannot be listed ({cause}); give a URL that fsspec reads, with its package "
        "installed (s3fs for s3://, gcsfs for gs://, adlfs for az://) and credentials where that package looks for "
        f"them (of s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) or as sources.{name}.credentials; or dvc://PATH, "
        "inside a DVC repository"
    )
