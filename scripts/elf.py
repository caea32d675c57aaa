"""What scripts/wheel.py reads and changes in a program: the ELF format, of 64 bits and little-endian.

`Program.needed` and `Program.versions` are what decides where a program runs; `Program.set_rpath` gives it another run path.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

MACHINES = {62: "x86_64", 183: "aarch64"}
# Tags of the dynamic section, types of program headers and of sections, and sizes of their entries.
NEEDED, STRTAB, SYMTAB, STRSZ, SONAME, RPATH, RUNPATH, VERNEED, VERNEEDNUM = 1, 5, 6, 10, 14, 15, 29, 0x6FFFFFFE, 0x6FFFFFFF
LOAD, DYNAMIC = 1, 2
DYNSYM = 11
SYMBOL = 24


class Broken(Exception):
    """The file is no program that this module can read."""


@dataclass
class Program:
    """A dynamically linked program or library."""

    data: bytearray
    machine: str

    @classmethod
    def read(cls, path: Path) -> "Program":
        """Reads a file; raises `Broken` where it is none of the above."""
        data = bytearray(path.read_bytes())
        if data[:6] != b"\x7fELF\x02\x01":
            raise Broken("expected a program for 64-bit Linux (ELF), found other contents")
        (machine,) = struct.unpack_from("<H", data, 18)
        if machine not in MACHINES:
            raise Broken(f"expected a program for x86_64 or aarch64, found one for ELF machine {machine}")
        program = cls(data, MACHINES[machine])
        try:
            program.needed()
        except (struct.error, StopIteration, ValueError) as error:
            raise Broken(f"expected a dynamically linked program, found none ({error or 'it has no dynamic section'})") from error
        return program

    def segments(self, kind: int) -> list[tuple[int, int, int]]:
        """Offset in the file, address and size of the segments of a type."""
        (start,), (size, count) = struct.unpack_from("<Q", self.data, 32), struct.unpack_from("<HH", self.data, 54)
        headers = [struct.unpack_from("<IIQQQQ", self.data, start + at * size) for at in range(count)]
        return [(offset, address, length) for type_, _, offset, address, _, length in headers if type_ == kind]

    def dynamic(self) -> list[tuple[int, int, int]]:
        """Place in the file, tag and value of each entry of the dynamic section."""
        offset, _, size = next(iter(self.segments(DYNAMIC)))
        entries = [(at, *struct.unpack_from("<QQ", self.data, at)) for at in range(offset, offset + size, 16)]
        return [entry for entry in entries if entry[1]]

    def value(self, tag: int) -> int:
        return next(value for _, found, value in self.dynamic() if found == tag)

    def offset(self, address: int) -> int:
        """Where in the file the byte of an address is."""
        return next(at + address - start for at, start, size in self.segments(LOAD) if start <= address < start + size)

    def text(self, at: int) -> str:
        """The text at a place of the table of names."""
        start = self.offset(self.value(STRTAB)) + at
        return self.data[start : self.data.index(0, start)].decode()

    def needed(self) -> list[str]:
        """Names of the libraries that it is linked with."""
        return [self.text(value) for _, tag, value in self.dynamic() if tag == NEEDED]

    def rpath(self) -> str:
        """The folders in which it looks for them, "" if it names none."""
        return next((self.text(value) for _, tag, value in self.dynamic() if tag in (RPATH, RUNPATH)), "")

    def version_entries(self) -> list[tuple[int, int]]:
        """For each version that it needs: places in the table of names of the library and of the version."""
        if not any(tag == VERNEED for _, tag, _ in self.dynamic()):
            return []
        found, at = [], self.offset(self.value(VERNEED))
        for _ in range(self.value(VERNEEDNUM)):
            _, count, library, first, after = struct.unpack_from("<HHIII", self.data, at)
            entry = at + first
            for _ in range(count):
                _, _, _, name, following = struct.unpack_from("<IHHII", self.data, entry)
                found.append((library, name))
                entry += following
            at += after
        return found

    def versions(self) -> dict[str, tuple[int, ...]]:
        """The newest version that it needs of each kind, such as {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 29)}."""
        newest: dict[str, tuple[int, ...]] = {}
        for _, name in self.version_entries():
            kind, _, number = self.text(name).partition("_")
            parts = tuple(int(part) for part in number.split(".") if part.isdigit())
            if parts:
                newest[kind] = max(newest.get(kind, ()), parts)
        return newest

    def names_used(self) -> set[int]:
        """Places in the table of names that something other than the run path refers to."""
        used = {value for _, tag, value in self.dynamic() if tag in (NEEDED, SONAME)}
        used.update(place for pair in self.version_entries() for place in pair)
        start, count = struct.unpack_from("<Q", self.data, 40)[0], struct.unpack_from("<HH", self.data, 58)
        for at in range(count[1]):
            _, kind, _, _, offset, size = struct.unpack_from("<IIQQQQ", self.data, start + at * count[0])
            if kind == DYNSYM:
                used.update(struct.unpack_from("<I", self.data, symbol)[0] for symbol in range(offset, offset + size, SYMBOL))
        return used

    def set_rpath(self, path: str) -> None:
        """Gives it another run path, which must be no longer, as DT_RPATH: that one comes before LD_LIBRARY_PATH.

        Bytes of the old path that are the end of another name are left: linkers let names share their ends.
        """
        if not self.rpath():
            raise Broken("expected a program with a run path, found one without: it is not that of this workspace")
        place, _, start = next(entry for entry in self.dynamic() if entry[1] in (RPATH, RUNPATH))
        old = len(self.text(start))
        if len(path) > old:
            raise Broken(f"run path {path}: expected at most the {old} characters of the program's own, found {len(path)}")
        shared = min((used for used in self.names_used() if start < used <= start + old), default=start + old)
        if shared <= start + len(path):
            raise Broken("the program's run path shares its characters with another name")
        at = self.offset(self.value(STRTAB)) + start
        self.data[at : at + shared - start] = path.encode().ljust(shared - start, b"\0")
        struct.pack_into("<Q", self.data, place, RPATH)
