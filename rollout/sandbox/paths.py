"""Opens files below a folder in which foreign code has made the names.

Each component is opened by itself and never followed by the kernel, so that no link that appears in between
leads out. Links that stay inside are followed here.
"""

import os
import stat
from contextlib import suppress

from slipstream.rollout.sandbox.interface import SandboxRefused

_MOST_LINKS = 40
"""Symbolic links in one path, as many as the kernel follows."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PART = 1 << 20


def checked(path: str) -> list[str]:
    """Return the components of a path that is relative and goes nowhere up. Raises SandboxRefused."""
    if path.startswith("/"):
        raise SandboxRefused(f"the path {path!r} is absolute; expected one relative to the sandbox's folder")
    components = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in components:
        raise SandboxRefused(
            f"the path {path!r} contains `..`; expected one that stays in the sandbox's folder"
        )
    if not components or path.endswith("/") or "\0" in path:
        raise SandboxRefused(f"the path {path!r} names no file; expected one such as 'folder/file.txt'")
    return components


class Folder:
    """A folder whose content foreign code has made. No foreign code runs while it is used."""

    def __init__(self, path: str, user: int) -> None:
        """``user``: whose files are read, and to whom new files and folders are given."""
        self._path = path
        self._user = user

    def read(self, path: str, longest: int) -> bytes:
        """Return the content of a regular file. Raises SandboxRefused."""
        try:
            file = self._open(path)
        except OSError as error:
            raise SandboxRefused(f"{path!r} cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise SandboxRefused(f"{path!r} is no regular file")
            if status.st_uid != self._user:  # a hard link to a file of the machine
                raise SandboxRefused(f"{path!r} does not belong to the sandbox")
            if status.st_size > longest:
                raise SandboxRefused(
                    f"{path!r} has {status.st_size} bytes; at most {longest} can be downloaded"
                )
            parts: list[bytes] = []
            while part := os.read(file, _PART):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(file)

    def write(self, path: str, data: bytes) -> None:
        """Write a file and the folders above it. What has its name is replaced, and never written through.

        Raises SandboxRefused.
        """
        *folders, name = checked(path)
        try:
            folder, _ = self._walk(folders, path, make=True)
            try:
                self._replace(folder, name, data)
            finally:
                os.close(folder)
        except OSError as error:
            raise SandboxRefused(f"{path!r} cannot be written: {error.strerror}") from error

    def _replace(self, folder: int, name: str, data: bytes) -> None:
        temporary = f".upload-{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        try:
            try:
                self._give(file)
                view = memoryview(data)
                while view:
                    view = view[os.write(file, view) :]
            finally:
                os.close(file)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(temporary, dir_fd=folder)
            raise

    def _give(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_uid != self._user:
            os.fchown(descriptor, self._user, self._user)

    def _open(self, path: str) -> int:
        """Open a file to read it. A pipe is opened without waiting for its other end."""
        components = checked(path)
        links = _MOST_LINKS
        while True:
            *folders, name = components
            folder, resolved = self._walk(folders, path, make=False)
            try:
                target = _link(folder, name)
                if target is None:
                    return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
            finally:
                os.close(folder)
            links -= 1
            components = _joined(resolved, target, path, links)

    def _walk(self, components: list[str], path: str, make: bool) -> tuple[int, list[str]]:
        """Open a folder. Return it, and its path without links. Raises SandboxRefused, OSError.

        A link sends the walk back to the start, with the link's target in its place.
        """
        links = _MOST_LINKS
        todo, resolved = list(components), list[str]()
        folder = os.open(self._path, _FOLDER)
        try:
            while todo:
                name = todo.pop(0)
                target = _link(folder, name)
                if target is None:
                    inner = self._enter(folder, name, make)
                    resolved.append(name)
                else:
                    links -= 1
                    todo, resolved = [*_joined(resolved, target, path, links), *todo], []
                    inner = os.open(self._path, _FOLDER)
                os.close(folder)
                folder = inner
        except BaseException:
            os.close(folder)
            raise
        return folder, resolved

    def _enter(self, folder: int, name: str, make: bool) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, _FOLDER, dir_fd=folder)
        self._give(inner)
        return inner


def _link(folder: int, name: str) -> str | None:
    """Return where a symbolic link leads; None: the name is no link."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def _joined(folders: list[str], target: str, path: str, links_left: int) -> list[str]:
    """Return the components of a link's target. Raises SandboxRefused if it leads out, or in circles."""
    if target.startswith("/"):
        raise SandboxRefused(f"the path {path!r} leads out of the sandbox's folder by a link to {target!r}")
    if links_left <= 0:
        raise SandboxRefused(f"the path {path!r} goes through more than {_MOST_LINKS} symbolic links")
    joined = list(folders)
    for part in target.split("/"):
        if part == "..":
            if not joined:
                raise SandboxRefused(
                    f"the path {path!r} leads out of the sandbox's folder by a link to {target!r}"
                )
            joined.pop()
        elif part not in ("", "."):
            joined.append(part)
    return joined
