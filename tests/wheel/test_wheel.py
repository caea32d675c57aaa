"""Tests of the wheel: what is in it, and what its command does in fresh environments.

    python3 tests/wheel/test_wheel.py PROGRAM [unittest's arguments]

PROGRAM is the built `rlhf`; a debug build will do. The libtorch that it was built with is taken from its run path. Standard library
only; no network: wheels of torch come from a package index on this machine, and are a few kB.
"""

import base64
import contextlib
import csv
import hashlib
import http.server
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import unittest.mock
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import elf
import wheel

# Set once, before the tests: see prepare().
PROGRAM = Path()
WORK = Path()
WHEEL = Path()
LIBTORCH = Path()
VENV = Path()

# In place of the program, where a test is about the launcher: it prints what it was given.
FAKE = """\
#!/bin/sh
case $1 in
--version) echo rlhf {version} ;;
fail) exit 7 ;;
*) echo "args: $*"
   echo "from: $RLHF_LIBTORCH_FROM"
   echo "path: $LD_LIBRARY_PATH"
   echo "real: $(readlink -f "$(dirname "$0")/../lib/rlhf/torch/lib/libtorch_cpu.so")"
   echo "gomp: $(readlink -f "$(dirname "$0")/../lib/rlhf/torch/lib/libgomp.so.1")"
   echo "self: $0" ;;
esac
"""


def prepare(program, work):
    """Makes the wheel and installs it; everything else is made by the tests."""
    global PROGRAM, WORK, WHEEL, LIBTORCH, VENV
    PROGRAM, WORK = program.resolve(), work
    made = subprocess.run(
        [sys.executable, ROOT / "scripts/wheel.py", PROGRAM, "--out", work / "dist", "--max_mb", "25"], capture_output=True, text=True
    )
    if made.returncode:
        sys.exit(f"error: scripts/wheel.py: {made.stderr.strip()}")
    WHEEL = next((work / "dist").glob("*.whl"))
    folders = (folder.replace("$ORIGIN", str(PROGRAM.parent)) for folder in elf.Program.read(PROGRAM).rpath().split(":"))
    LIBTORCH = next((Path(folder).resolve().parent for folder in folders if (Path(folder) / "libtorch_cpu.so").exists()), None)
    if LIBTORCH is None:
        sys.exit(f"error: {PROGRAM}: expected libtorch in a folder of its run path, found none; run scripts/setup.sh and build again")
    VENV = environment("venv")


def environment(name):
    """A fresh virtual environment with the wheel, without pip."""
    folder = WORK / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin/python"]
    done = subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", WHEEL],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "0"},
    )
    if done.returncode:
        sys.exit(f"error: pip could not install the wheel: {done.stderr.strip()}")
    return folder


def packages(venv):
    return next((venv / "lib").glob("python3*/site-packages"))


def fake_torch(folder, version, libgomp="libgomp.so.1", **more):
    """A folder like that of torch, with empty libraries."""
    files = {
        "__init__.py": "raise SystemExit('imported')",
        "version.py": f"__version__ = '{version}'\n",
        "lib/libtorch_cpu.so": "",
        f"lib/{libgomp}": "",
        **more,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


class Ran:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.lines = dict(line.split(": ", 1) for line in self.out.splitlines() if ": " in line)


class Case(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(dir=WORK))
        self.cache = self.folder / "cache"

    def variables(self, **more):
        """The environment of a command: nothing of the tests' own settings."""
        keep = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        values = {**keep, "HOME": str(self.folder), "RLHF_CACHE": str(self.cache), "TMPDIR": str(self.folder), **more}
        return {name: str(value) for name, value in values.items() if value is not None}

    def rlhf(self, *arguments, venv=None, **more):
        command = [str((venv or VENV) / "bin/rlhf"), *map(str, arguments)]
        done = subprocess.run(
            command, env=self.variables(**more), stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=self.folder, timeout=120
        )
        self.assertNotIn("Traceback", done.stderr)
        return Ran(done)

    def one_error(self, ran, *parts, code=1):
        """It failed with one line that has all parts; lines of progress may come before."""
        lines = ran.err.strip().splitlines()
        self.assertEqual((ran.code, len([line for line in lines if not line.startswith("setup: ")])), (code, 1), ran.err)
        self.assertTrue(lines[-1].startswith("error: "), ran.err)
        for part in parts:
            self.assertIn(str(part), lines[-1])


class Contents(Case):
    """The file itself."""

    @classmethod
    def setUpClass(cls):
        cls.archive = zipfile.ZipFile(WHEEL)
        cls.addClassCleanup(cls.archive.close)
        cls.names = cls.archive.namelist()
        cls.info = next(name.split("/")[0] for name in cls.names if ".dist-info/" in name)
        cls.program = cls.folder_program()

    @classmethod
    def folder_program(cls):
        path = WORK / "of-the-wheel"
        path.write_bytes(cls.archive.read("rlhf/bin/rlhf"))
        return elf.Program.read(path)

    def test_the_record_has_every_file_with_its_hash_and_size(self):
        rows = list(csv.reader(io.StringIO(self.archive.read(f"{self.info}/RECORD").decode())))
        self.assertEqual(sorted(row[0] for row in rows), sorted(self.names))
        for name, digest, size in rows:
            if name != f"{self.info}/RECORD":
                data = self.archive.read(name)
                expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                self.assertEqual((digest, size), (f"sha256={expected}", str(len(data))), name)

    def test_it_has_the_program_the_package_the_data_licences_and_notices(self):
        expected = [
            "rlhf/__init__.py",
            "rlhf/_launch.py",
            "rlhf/bin/rlhf",
            "rlhf/_sentiment/data/sft.jsonl",
            "rlhf/_sentiment/tokenizer/tokenizer.json",
            "rlhf/_sentiment/summary.py",
            f"{self.info}/licenses/LICENSE-MIT",
            f"{self.info}/licenses/LICENSE-APACHE",
        ]
        for name in expected:
            self.assertIn(name, self.names)
        self.assertFalse([name for name in self.names if "__pycache__" in name or name.endswith(".pyc")])
        self.assertEqual(self.archive.getinfo("rlhf/bin/rlhf").external_attr >> 16, 0o100755)
        notices = self.archive.read(f"{self.info}/licenses/NOTICES.txt").decode()
        for part in (
            "tokenizers 0.",
            "clap ",
            "axum ",
            "ratatui ",
            "onig_sys ",
            "ring 0.",
            "zstd-sys ",
            "the Rust standard library",
            "templates of libtorch's headers",
            "From PyTorch:",
            "K.Kosako",
        ):
            self.assertIn(part, notices)

    def test_the_data_of_the_demo_is_a_few_hundred_kb_of_the_file(self):
        size = sum(entry.compress_size for entry in self.archive.infolist() if entry.filename.startswith("rlhf/_sentiment/"))
        self.assertLess(size, 500_000)

    def test_versions_agree(self):
        version = wheel.version()
        self.assertEqual(self.info, f"rlhf_rs-{version}.dist-info")
        metadata = self.archive.read(f"{self.info}/METADATA").decode()
        for line in (
            "Name: rlhf-rs",
            f"Version: {version}",
            "Requires-Python: >=3.10",
            'Requires-Dist: torch==2.11.0; extra == "torch"',
            "License-Expression: MIT OR Apache-2.0",
        ):
            self.assertIn(line + "\n", metadata)
        script = "import rlhf, importlib.metadata as m; print(rlhf.__version__, m.version('rlhf-rs'))"
        done = subprocess.run([VENV / "bin/python", "-c", script], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout, f"{version} {version}\n")

    def test_its_platform_has_all_versions_that_the_program_needs(self):
        number = int(re.fullmatch(r"rlhf_rs-[\d.]+-py3-none-manylinux_2_(\d+)_(x86_64|aarch64)\.whl", WHEEL.name)[1])
        needed = self.program.versions()
        self.assertGreaterEqual(number, max(28, needed["GLIBC"][1]))
        self.assertIn(f"manylinux_2_{number}_", self.archive.read(f"{self.info}/WHEEL").decode())
        readelf = shutil.which("readelf")
        if readelf:
            listed = subprocess.run([readelf, "-V", WORK / "of-the-wheel"], capture_output=True, text=True, check=True).stdout
            found = max(tuple(map(int, text.split("."))) for text in re.findall(r"Name: GLIBC_([\d.]+)", listed))
            self.assertEqual(found, needed["GLIBC"])

    def test_the_platform_follows_each_kind_of_version(self):
        def platform(**versions):
            fake = unittest.mock.Mock(machine="x86_64")
            fake.needed.return_value = ["libc.so.6", "libtorch_cpu.so", "libgomp-24e2ab19.so.1"]
            fake.versions.return_value = versions
            return wheel.platform(fake)

        self.assertEqual(platform(GLIBC=(2, 17)), "manylinux_2_28_x86_64")
        self.assertEqual(platform(GLIBC=(2, 34), GLIBCXX=(3, 4, 24)), "manylinux_2_34_x86_64")
        self.assertEqual(platform(GLIBC=(2, 28), GLIBCXX=(3, 4, 29)), "manylinux_2_34_x86_64")
        self.assertEqual(platform(GLIBC=(2, 28), CXXABI=(1, 3, 14)), "manylinux_2_39_x86_64")
        with self.assertRaisesRegex(wheel.Failure, "GLIBCXX_3.4.99"):
            platform(GLIBC=(2, 28), GLIBCXX=(3, 4, 99))

    def test_the_program_is_stripped_and_names_no_folder_of_the_builder(self):
        self.assertEqual(self.program.rpath(), "$ORIGIN/../lib/rlhf/torch/lib")
        self.assertNotIn(elf.RUNPATH, [tag for _, tag, _ in self.program.dynamic()])
        self.assertLess(len(self.program.data), PROGRAM.stat().st_size)
        original = elf.Program.read(PROGRAM)
        self.assertEqual((self.program.needed(), self.program.versions()), (original.needed(), original.versions()))

    def test_the_same_inputs_give_the_same_bytes(self):
        files = wheel.contents(elf.Program(bytearray(b"program"), "x86_64"), None, "0.1.0", "any", "notices")
        made = []
        for name in ("a.whl", "b.whl"):
            wheel.write(self.folder / name, dict(reversed(files.items()) if made else files))
            made.append((self.folder / name).read_bytes())
        self.assertEqual(made[0], made[1])

    def test_what_is_no_program_is_an_error(self):
        text = self.folder / "text"
        text.write_text("x" * 100)
        for path, part in ((self.folder / "none", "no such program"), (text, "strip failed"), (Path("/bin/true"), "found one without")):
            done = subprocess.run(
                [sys.executable, ROOT / "scripts/wheel.py", path, "--notices", text, "--out", self.folder], capture_output=True, text=True
            )
            self.one_error(Ran(done), path, part)

    def test_what_is_no_cuda_library_is_an_error(self):
        text = self.folder / "text"
        text.write_text("x" * 100)
        other = subprocess.run(["sh", "-c", "ldd /bin/sh | sed -n 's/.* => \\(.*libc.so.6\\) .*/\\1/p'"], capture_output=True, text=True)
        for path, part in (
            (self.folder / "none", "no such library; build it with: scripts/cuda.sh --library"),
            (text, "strip failed"),
            (other.stdout.strip(), "expected the library that scripts/cuda.sh builds"),
        ):
            command = [sys.executable, ROOT / "scripts/wheel.py", PROGRAM, "--cuda_library", path, "--notices", text, "--out", self.folder]
            self.one_error(Ran(subprocess.run(command, capture_output=True, text=True)), path, part)


class Real(Case):
    """The program itself, with the libtorch that it was built with in the cache."""

    def setUp(self):
        super().setUp()
        folder = self.cache / "libtorch-2.11.0"
        folder.mkdir(parents=True)
        for name in ("torch", "nvidia"):
            if (LIBTORCH.parent / name).exists():
                (folder / name).symlink_to(LIBTORCH.parent / name)

    def test_it_starts_and_is_of_the_same_version(self):
        for command in (["--version"], ["-V"]):
            self.assertEqual(self.rlhf(*command).out, f"rlhf {wheel.version()}\n")
        done = subprocess.run(
            [VENV / "bin/python", "-m", "rlhf", "--version"], env=self.variables(), capture_output=True, text=True, cwd=self.folder
        )
        self.assertEqual(done.stdout, f"rlhf {wheel.version()}\n", done.stderr)

    def test_an_error_and_its_exit_code_are_those_of_the_program(self):
        ran = self.rlhf("sft", "--no_such_flag", "1")
        self.assertEqual((ran.code, "--no_such_flag" in ran.err), (2, True), ran.err)

    def test_the_help_has_the_commands_of_the_package(self):
        ran = self.rlhf("--help")
        self.assertIn("Usage: rlhf <COMMAND>", ran.out)
        self.assertRegex(ran.out, r"\n  setup  .*\n  demo   ")

    def test_its_children_have_the_libraries_of_their_own(self):
        module = textwrap.dedent("""\
            import os
            def reward(completions, **columns):
                names = [name for name in os.environ if name.startswith("LD_")]
                libraries = [line for line in open("/proc/self/maps") if "torch" in line]
                return [len(names) + len(libraries) for _ in completions]
            """)
        (self.folder / "rewards.py").write_text(module)
        (self.folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        ran = self.rlhf(
            "score",
            "--reward",
            "python:rewards.reward",
            "--tokenizer_name",
            ROOT / "examples/sentiment/tokenizer",
            "--dataset_name",
            "rows.jsonl",
            RLHF_PYTHON=VENV / "bin/python",
        )
        self.assertEqual(json.loads(ran.out or "{}").get("score"), 0, ran.err)

    def test_another_libtorch_of_the_caller_s_library_path_is_not_loaded(self):
        (self.folder / "libc10.so").write_text("not a library")
        ran = self.rlhf("--version", LD_LIBRARY_PATH=self.folder)
        self.assertEqual((ran.code, ran.out), (0, f"rlhf {wheel.version()}\n"), ran.err)

    def test_doctor_says_which_libtorch_was_taken(self):
        ran = self.rlhf("doctor", "--json", "--offline", "--no_self_test")
        checks = {check["name"]: check for check in json.loads(ran.out)["checks"]}
        self.assertEqual(checks["libtorch"]["status"], "ok", checks["libtorch"])
        self.assertEqual(len(checks["libtorch"]["facts"]["openmp"]), 1)
        self.assertTrue(checks["libtorch"]["facts"]["version"].startswith("2.11.0"))
        self.assertEqual(checks["libtorch"]["facts"]["from"], f"from the cache, {self.cache / 'libtorch-2.11.0'}")


class Launcher(Case):
    """Which libtorch is taken, and how the program is started: with another program in its place."""

    @classmethod
    def setUpClass(cls):
        cls.venv = with_fake_program("launcher")

    def rlhf(self, *arguments, venv=None, **more):
        return super().rlhf(*arguments, venv=venv or self.venv, **more)

    def tearDown(self):
        shutil.rmtree(packages(self.venv) / "torch", ignore_errors=True)

    def test_libtorch_is_looked_for_in_order(self):
        named = fake_torch(self.folder / "named", "2.11.0+cu128")
        of_environment = fake_torch(packages(self.venv) / "torch", "2.11.0+cpu")
        of_cache = fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0+cu130")
        ran = self.rlhf("x", LIBTORCH=named)
        self.assertEqual((ran.lines["real"], ran.lines["from"]), (str(named / "lib/libtorch_cpu.so"), f"from $LIBTORCH, {named}"))
        ran = self.rlhf("x", LIBTORCH="")
        self.assertEqual(ran.lines["real"], str(of_environment / "lib/libtorch_cpu.so"))
        self.assertEqual(ran.lines["from"], f"torch 2.11.0+cpu of this Python environment, {of_environment}")
        shutil.rmtree(of_environment)
        ran = self.rlhf("x")
        self.assertEqual(ran.lines["real"], str(of_cache / "lib/libtorch_cpu.so"))
        with_cuda = fake_torch(self.cache / "cuda-libtorch-2.11.0/torch", "2.11.0+cu130", **{"lib/libtorch_cuda.so": ""})
        self.assertEqual(self.rlhf("x").lines["real"], str(with_cuda / "lib/libtorch_cpu.so"))

    def test_every_build_of_torch_2_11_will_do_and_no_other_version(self):
        of_cache = fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        for version in ("2.11.0", "2.11.0+cpu", "2.11.0+cu126", "2.11.0+cu128", "2.11.0+cu130", "2.11.1", "2.12.0", "2.4.1+cu121"):
            folder = fake_torch(packages(self.venv) / "torch", version)
            taken = folder if version.startswith("2.11.0") else of_cache
            self.assertEqual(self.rlhf("x").lines["real"], str(taken / "lib/libtorch_cpu.so"), version)
        shutil.rmtree(self.cache)
        self.one_error(self.rlhf("x"), f"(torch 2.4.1+cu121 in {folder} is left alone)", "run 'rlhf setup' once")

    def test_the_cuda_library_is_linked_beside_a_libtorch_of_cuda_13_alone(self):
        library = packages(self.venv) / "rlhf/cuda13/libtch_ext_cuda.so"
        library.parent.mkdir()
        self.addCleanup(shutil.rmtree, library.parent)
        library.write_text("of the package")
        runtimes = {"13": "libcudart.so.13\0libc.so.6\0", "12": "libcudart-9335f6a2.so.12\0x.so.13\0", "cpu": ""}
        linked = {}
        for name, text in runtimes.items():
            more = {"lib/libtorch_cuda.so": "", "lib/libc10_cuda.so": text} if text else {}
            folder = fake_torch(self.folder / name, "2.11.0", **{"lib/libtch_ext_cuda.so": "of torch", **more})
            ran = self.rlhf("x", LIBTORCH=folder)
            link = Path(ran.lines["self"]).parent.parent / "lib/rlhf/torch/lib/libtch_ext_cuda.so"
            linked[name] = link.read_text()
            self.assertEqual((folder / "lib/libtch_ext_cuda.so").read_text(), "of torch")
        self.assertEqual(linked, {"13": "of the package", "12": "of torch", "cpu": "of torch"})

    def test_a_folder_named_torch_beside_the_caller_is_no_package(self):
        fake_torch(self.folder / "torch", "2.11.0")
        done = subprocess.run(
            [self.venv / "bin/python", "-m", "rlhf", "x"], env=self.variables(), capture_output=True, text=True, cwd=self.folder
        )
        self.one_error(Ran(done), "found none")

    def test_a_wrong_libtorch_variable_is_an_error(self):
        other = fake_torch(self.folder / "other", "2.10.0")
        unknown = fake_torch(self.folder / "unknown", "2.11.0")
        (unknown / "version.py").unlink()
        for value, part in (
            ("torch", "expected an absolute path"),
            (self.folder, "found none"),
            (other, "found 2.10.0"),
            (unknown, "no file with its version"),
        ):
            self.one_error(self.rlhf("x", LIBTORCH=value), f"LIBTORCH={value}: expected", part, "unset it")

    def test_a_libtorch_with_headers_or_of_an_archive_will_do(self):
        header = '#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION \\\n  "2.11.0"\n'
        for name, text in (("include/torch/headeronly/version.h", header), ("build-version", "2.11.0+cpu\n")):
            folder = fake_torch(self.folder / name.split("/")[0], "", **{name: text})
            (folder / "version.py").unlink()
            self.assertEqual(self.rlhf("x", LIBTORCH=folder).code, 0, name)

    def test_the_program_finds_a_libgomp_with_a_name_of_its_own(self):
        folder = fake_torch(self.folder / "t", "2.11.0", libgomp="libgomp-24e2ab19.so.1")
        self.assertEqual(self.rlhf("x", LIBTORCH=folder).lines["gomp"], str(folder / "lib/libgomp-24e2ab19.so.1"))

    def test_arguments_and_the_environment_arrive_as_they_are(self):
        fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        ran = self.rlhf("sft", "--x", "a b", "", "*", LD_LIBRARY_PATH="/mine")
        self.assertEqual((ran.lines["args"], ran.lines["path"]), ("sft --x a b  *", "/mine"))
        self.assertEqual(self.rlhf("fail").code, 7)

    def test_a_start_adds_at_most_60_ms(self):
        fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        program = self.rlhf("x").lines["self"]

        def fastest(*command):
            times = []
            for _ in range(12):
                begin = time.perf_counter()
                subprocess.run(command, env=self.variables(), stdout=subprocess.DEVNULL, check=True)
                times.append(time.perf_counter() - begin)
            return 1000 * min(times)

        added = fastest(self.venv / "bin/rlhf", "--version") - fastest(program, "--version")
        python = fastest(self.venv / "bin/python", "-c", "")
        print(f"a start through the console script adds {added:.0f} ms; Python alone starts in {python:.0f} ms")
        # A machine that is busy or slow takes longer for both.
        self.assertLess(added, max(60, 3 * python))

    def test_a_cache_that_cannot_be_written_is_done_without(self):
        fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        (self.cache / "programs").write_text("in the way")
        runtime = self.folder / "runtime"
        runtime.mkdir(mode=0o700)
        self.assertIn(str(runtime), self.rlhf("x", XDG_RUNTIME_DIR=runtime).lines["self"])
        self.assertIn(f"{self.folder}/rlhf-{os.geteuid()}/", self.rlhf("x").lines["self"])
        self.one_error(self.rlhf("x", TMPDIR="/proc/none"), "no folder to start the program in", "programs: File exists", "set RLHF_CACHE")

    def test_no_program_is_started_from_a_folder_of_others(self):
        fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        (self.cache / "programs").mkdir()
        (self.cache / "programs").chmod(0o777)
        self.assertIn(f"{self.folder}/rlhf-", self.rlhf("x").lines["self"])

    def test_folders_of_programs_that_are_gone_are_removed(self):
        old = fake_torch(self.folder / "old", "2.11.0")
        first = self.rlhf("x", LIBTORCH=old).lines["self"]
        self.assertEqual(self.rlhf("x", LIBTORCH=old).lines["self"], first)
        shutil.rmtree(old)
        fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        second = self.rlhf("x").lines["self"]
        self.assertEqual(len(list((self.cache / "programs").iterdir())), 1)
        # The program is another one after an upgrade.
        path = packages(self.venv) / "rlhf/bin/rlhf"
        content = path.read_text()
        path.unlink()
        path.write_text(content + "# new\n")
        path.chmod(0o755)
        self.assertNotEqual(self.rlhf("x").lines["self"], second)

    def test_another_distribution_named_rlhf_is_told_of_once(self):
        fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        other = packages(self.venv) / "rlhf-0.1.0.dist-info"
        other.mkdir()
        self.addCleanup(other.rmdir)
        self.assertEqual(self.rlhf("x").err, "")
        for command in ("doctor", "setup"):
            self.assertEqual(self.rlhf(command).err.count("another distribution, named rlhf"), 1)

    def test_the_demo_needs_a_new_folder_and_reports_a_stage_that_fails(self):
        fake_torch(self.cache / "libtorch-2.11.0/torch", "2.11.0")
        (self.folder / "file").write_text("")
        self.one_error(self.rlhf("demo", "--keep", "file"), "--keep file: expected a folder", code=2)
        self.one_error(self.rlhf("demo", "--keep", "."), "--keep .: expected a new or an empty folder", code=2)
        self.one_error(self.rlhf("demo", "--steps", "3"), "unrecognized arguments: --steps 3", code=2)
        script = packages(self.venv) / "rlhf/bin/rlhf"
        content = script.read_text()
        self.addCleanup(script.write_text, content)
        script.write_text("#!/bin/sh\nexit 3\n")
        self.one_error(self.rlhf("demo"), "rlhf sft failed with exit code 3, for the reason above")
        self.assertEqual(list(self.folder.glob("rlhf-demo-*")), [])


def with_fake_program(name):
    """Another environment, a copy of the first, without the real program."""
    venv = WORK / name
    shutil.copytree(VENV, venv, symlinks=True, ignore=lambda folder, _: ["rlhf"] if folder.endswith("rlhf/bin") else [])
    script = venv / "bin/rlhf"
    script.write_text(script.read_text().replace(str(VENV), str(venv)))
    program = packages(venv) / "rlhf/bin/rlhf"
    program.write_text(FAKE.format(version=wheel.version()))
    program.chmod(0o755)
    return venv


def fake_wheel(name, files):
    """The bytes of a wheel, and its SHA-256."""
    distribution, number = name.split("-")[:2]
    info = f"{distribution}-{number}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {number}\n{files.get('requires', '')}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n",
        f"{info}/RECORD": "",
    }
    files.pop("requires", None)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()


class Index(http.server.BaseHTTPRequestHandler):
    """A package index, and a proxy for others: paths of full addresses are served as well."""

    wheels: dict = {}
    asked: list = []
    cut: set = set()
    slow = 0.0

    def do_GET(self):
        path = re.sub(r"^https?://[^/]*", "", self.path)
        self.asked.append(self.path)
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if path.startswith("/simple/"):
            project = name.replace("-", "_").lower()
            links = [each for each in self.wheels if each.split("-")[0].lower() == project]
            page = "".join('<a href="/files/{}">{}</a>\n'.format(each.replace("+", "%2B"), each) for each in links)
            self.reply(page.encode(), "text/html") if links else self.send_error(404)
        elif data := self.wheels.get(asked := name.replace("%2B", "+")):
            time.sleep(self.slow)
            self.reply(data, "application/octet-stream", asked in self.cut)
        else:
            self.send_error(404)

    def reply(self, data, kind, cut=False):
        # A client that was ended has closed its connection.
        with contextlib.suppress(OSError):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)

    def log_message(self, *_):
        pass


class Setup(Case):
    """`rlhf setup` with a package index on this machine."""

    @classmethod
    def setUpClass(cls):
        cls.venv = with_fake_program("setup")
        cls.arch = os.uname().machine
        cls.names = (
            f"torch-2.11.0-cp312-cp312-manylinux_2_28_{cls.arch}.whl",
            f"torch-2.11.0+cpu-cp312-cp312-manylinux_2_28_{cls.arch}.whl",
        )
        libraries = {
            f"torch/lib/{name}": name * 1000
            for name in ("libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libtorch_cuda.so", "libtorch_python.so")
        }
        requires = 'Requires-Dist: nvidia-cublas==13.1.0.3; platform_system == "Linux"\nRequires-Dist: sympy>=1\n'
        made = {}
        for name, version in zip(cls.names, ("2.11.0+cu130", "2.11.0+cpu")):
            made[name] = fake_wheel(
                name, {"torch/version.py": f"__version__ = '{version}'\n", "torch/__init__.py": "", **libraries, "requires": requires}
            )
        parts = {
            "nvidia_cuda_runtime-13.0.96": ["libcudart.so.13"],
            "nvidia_cuda_cupti-13.0.85": ["libcupti.so.13", "libnvperf_host.so"],
            "nvidia_cublas-13.1.0.3": ["libcublas.so.13"],
        }
        for name, files in parts.items():
            made[f"{name}-py3-none-manylinux_2_25_{cls.arch}.whl"] = fake_wheel(name, {f"nvidia/cu13/lib/{file}": file for file in files})
        cls.made = {name: data for name, (data, _) in made.items()}
        hashes = {name.split("-")[0]: value for name, (_, value) in made.items() if name.startswith("nvidia")}
        # In place of the table of the real wheels.
        with open(packages(cls.venv) / "rlhf/_wheels.py", "a") as table:
            table.write(
                textwrap.dedent(f"""
                import os
                ARCH = {cls.arch!r}
                TORCH = {{ARCH: ({made[cls.names[0]][1]!r},)}}
                TORCH_CPU = {{ARCH: ({made[cls.names[1]][1]!r},)}}
                BESIDE = {{"nvidia-cuda-runtime==13.0.96": {{ARCH: ({hashes["nvidia_cuda_runtime"]!r},)}},
                          "nvidia-cuda-cupti==13.0.85": {{ARCH: ({hashes["nvidia_cuda_cupti"]!r},)}}}}
                NEEDS = {{"cpu": int(os.environ.get("TEST_NEEDS", 1)), "cuda": 1}}
                """)
            )
        cls.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
        cls.address = f"http://127.0.0.1:{cls.server.server_port}"
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()
        cls.addClassCleanup(cls.server.shutdown)
        # pip outside of the environment, as there is none in it.
        cls.tools = WORK / "tools"
        cls.tools.mkdir()
        (cls.tools / "pip3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
        (cls.tools / "pip3").chmod(0o755)

    def setUp(self):
        super().setUp()
        Index.wheels, Index.asked, Index.cut, Index.slow = dict(self.made), [], set(), 0.0
        del Index.wheels[self.names[1]]

    def variables(self, **more):
        index = {
            "PIP_INDEX_URL": f"{self.address}/simple",
            "PIP_RETRIES": "0",
            "PIP_RESUME_RETRIES": "0",
            "PATH": f"{self.tools}:/usr/bin:/bin",
        }
        return super().variables(**{**index, **more})

    def rlhf(self, *arguments, **more):
        return super().rlhf(*arguments, venv=self.venv, **more)

    def downloads(self, start):
        return [path for path in Index.asked if f"/files/{start}" in path]

    def files(self):
        folder = self.cache / "libtorch-2.11.0"
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def nothing_is_left(self):
        left = [path for path in self.cache.rglob("*") if path.suffix != ".lock"] if self.cache.is_dir() else []
        self.assertEqual(left, [])

    def test_libtorch_is_fetched_once_with_what_it_is_linked_with(self):
        ran = self.rlhf("setup")
        self.assertEqual(ran.code, 0, ran.err)
        first, last = ran.err.strip().splitlines()
        self.assertIn("fetching libtorch 2.11.0 into ~/cache/libtorch-2.11.0, once (530 MB", first)
        self.assertEqual(last, f"setup: libtorch 2.11.0+cu130 is ready: from the cache, {self.cache / 'libtorch-2.11.0'}")
        self.assertEqual(
            self.files(),
            [
                "nvidia/cu13/lib/libcudart.so.13",
                "nvidia/cu13/lib/libcupti.so.13",
                "torch/lib/libc10.so",
                "torch/lib/libgomp.so.1",
                "torch/lib/libtorch_cpu.so",
                "torch/version.py",
            ],
        )
        self.assertEqual(self.rlhf("x").lines["real"], str(self.cache / "libtorch-2.11.0/torch/lib/libtorch_cpu.so"))
        asked = len(Index.asked)
        self.assertEqual(self.rlhf("setup").code, 0)
        self.assertEqual(len(Index.asked), asked)

    def test_a_build_for_cpus_is_preferred_and_needs_nothing_of_nvidia_s(self):
        Index.wheels = self.made
        self.assertEqual(self.rlhf("setup").code, 0)
        self.assertEqual((len(self.downloads("torch-2.11.0%2Bcpu")), len(self.downloads("nvidia"))), (1, 0))

    def test_cuda_comes_into_a_folder_of_its_own(self):
        ran = self.rlhf("setup", "--device", "cuda")
        self.assertEqual(ran.code, 0, ran.err)
        there = sorted(path.name for path in (self.cache / "cuda-libtorch-2.11.0").rglob("*.so*"))
        self.assertEqual(there, ["libc10.so", "libcublas.so.13", "libgomp.so.1", "libtorch_cpu.so", "libtorch_cuda.so"])
        self.assertEqual(self.rlhf("setup").code, 0)
        self.assertFalse((self.cache / "libtorch-2.11.0").exists())

    def test_cuda_where_another_libtorch_comes_first_is_an_error(self):
        named = fake_torch(self.folder / "named", "2.11.0")
        self.one_error(
            self.rlhf("setup", "--device", "cuda", LIBTORCH=named),
            str(named),
            "expected a build with CUDA, found one without",
            "unset LIBTORCH",
        )

    def test_nothing_is_downloaded_in_a_pipe_or_on_ci(self):
        for more in ({}, {"CI": "true"}):
            self.one_error(
                self.rlhf("sft", "--help", **more),
                "libtorch 2.11.0: expected in $LIBTORCH, this Python environment or ~/cache/libtorch-2.11.0",
                "run 'rlhf setup' once",
                "MB",
            )
        self.one_error(self.rlhf("demo"), "run 'rlhf setup' once")
        self.assertEqual(self.rlhf("--version").out, f"rlhf {wheel.version()}\n")
        self.assertIn("run 'rlhf setup' once", self.rlhf("--help").out)
        self.assertEqual((Index.asked, self.cache.exists()), ([], False))

    def on_terminal(self, *arguments, **more):
        """The output of a command whose standard error is a terminal."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(self.venv / "bin/rlhf", ["rlhf", *arguments], self.variables(**more))
        text = b""
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 4096):
                text += part
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()

    def test_the_first_use_on_a_terminal_fetches_it_and_ci_does_not(self):
        code, text = self.on_terminal("x", CI="true")
        self.assertEqual((code, Index.asked), (1, []), text)
        Index.slow = 1
        code, text = self.on_terminal("x")
        self.assertEqual(code, 0, text)
        self.assertLess(text.index("once (530 MB"), text.index("args: x"))
        self.assertRegex(text, r"\r +\d+ MB, \d s ")

    def test_two_first_uses_at_once_fetch_it_once(self):
        Index.slow = 1
        started = [
            subprocess.Popen([self.venv / "bin/rlhf", "setup"], env=self.variables(), stderr=subprocess.PIPE, text=True) for _ in range(2)
        ]
        texts = [process.communicate(timeout=60)[1] for process in started]
        self.assertEqual([process.returncode for process in started], [0, 0], texts)
        self.assertEqual(sum("waiting for another set-up" in text for text in texts), 1)
        self.assertEqual(len(self.downloads("torch")), 1)

    def test_another_file_of_the_same_name_is_refused(self):
        Index.wheels[self.names[0]] = fake_wheel(self.names[0], {"torch/lib/libtorch_cpu.so": "other"})[0]
        self.one_error(self.rlhf("setup"), "pip could not download torch==2.11.0: the file has another SHA-256 than expected (")
        self.nothing_is_left()

    def test_a_download_that_is_cut_is_an_error_and_leaves_nothing(self):
        Index.cut = {self.names[0]}
        ran = self.rlhf("setup")
        self.one_error(ran, "pip could not download torch==2.11.0: ")
        self.assertRegex(ran.err, "the connection was cut|another SHA-256")
        self.nothing_is_left()
        Index.cut = set()
        self.assertEqual(self.rlhf("setup").code, 0)

    def test_each_failure_of_the_index_has_its_reason(self):
        del Index.wheels[self.names[0]]
        self.one_error(self.rlhf("setup"), "the package index has no such wheel for this machine")
        self.one_error(self.rlhf("setup", PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1"), "the index refuses connections")
        self.one_error(self.rlhf("setup", PIP_NO_INDEX="1"), "the package index has no such wheel for this machine")
        self.nothing_is_left()

    def test_pip_s_configuration_is_that_of_the_user(self):
        config = self.folder / "pip.conf"
        config.write_text(
            f"[global]\nindex-url = http://none.invalid/simple\nextra-index-url = http://extra.invalid/simple\nproxy = {self.address}\n"
            "trusted-host = none.invalid extra.invalid\n"
        )
        ran = self.rlhf("setup", PIP_CONFIG_FILE=config, PIP_INDEX_URL=None)
        self.assertEqual(ran.code, 0, ran.err)
        self.assertIn("http://extra.invalid/simple/torch/", Index.asked)
        self.assertTrue(any(path.startswith("http://") and "/files/torch" in path for path in Index.asked), Index.asked)

    def test_neither_pip_nor_uv_is_an_error_with_what_to_do(self):
        empty = self.folder / "empty"
        empty.mkdir()
        self.one_error(self.rlhf("setup", PATH=empty), "no pip for", "no uv on PATH", "install one of them")

    def test_uv_is_taken_where_there_is_no_pip(self):
        tools = self.folder / "bin"
        tools.mkdir()
        # It downloads as uv does: it unpacks into a folder, and knows hashes.
        (tools / "uv").write_text(
            textwrap.dedent(f"""\
            #!{sys.executable}
            import re, subprocess, sys, zipfile
            words = sys.argv
            assert words[1:3] == ["pip", "install"] and words[words.index("--python-version") + 1] == "3.12" and "--require-hashes" in words
            target, listed = (words[words.index(name) + 1] for name in ("--target", "-r"))
            tag = ["--implementation", "cp", "--python-version", "3.12", "--platform", "manylinux_2_28_{self.arch}", "--platform", "manylinux_2_25_{self.arch}"]
            wheels = target + "/wheels"
            subprocess.run([sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:", *tag, "-d", wheels, "-r", listed], check=True)
            import pathlib, shutil
            for path in pathlib.Path(wheels).iterdir():
                zipfile.ZipFile(path).extractall(target)
            shutil.rmtree(wheels)
            """)
        )
        (tools / "uv").chmod(0o755)
        ran = self.rlhf("setup", PATH=f"{tools}:/usr/bin:/bin")
        self.assertEqual((ran.code, len(self.files())), (0, 6), ran.err)

    def test_too_little_room_is_told_before_and_after(self):
        self.one_error(
            self.rlhf("setup", TEST_NEEDS=10**9),
            "~/cache: too little disk space for libtorch: expected 1000000000 MB free, found",
            "RLHF_CACHE",
        )
        self.nothing_is_left()
        # A limit on the size of files takes the place of a disk that fills up meanwhile.
        command = f"ulimit -f 1; exec {self.venv}/bin/rlhf setup"
        done = subprocess.run(["bash", "-c", command], env=self.variables(), capture_output=True, text=True)
        self.one_error(Ran(done), "a limit on the size of files was reached")
        self.nothing_is_left()

    def test_a_disk_that_is_full_is_an_error(self):
        self.cache.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", self.cache], capture_output=True).returncode:
            self.skipTest("no file system can be mounted here")
        self.addCleanup(subprocess.run, ["umount", self.cache], check=True)
        self.one_error(self.rlhf("setup", TEST_NEEDS=0), "no space is left on the disk")
        self.nothing_is_left()

    def test_a_cache_that_cannot_be_made_is_an_error(self):
        (self.folder / "file").write_text("")
        self.one_error(
            self.rlhf("setup", RLHF_CACHE=self.folder / "file/cache"),
            "file/cache/libtorch-2.11.0: libtorch cannot be put there: Not a directory",
            "set RLHF_CACHE",
        )

    def test_a_signal_ends_the_fetch_and_leaves_nothing(self):
        Index.slow = 5
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            Index.asked.clear()
            process = subprocess.Popen(
                [self.venv / "bin/rlhf", "setup"],
                env=self.variables(),
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            for _ in range(300):
                if self.downloads("torch"):
                    break
                time.sleep(0.1)
            process.send_signal(number)
            self.assertEqual((process.communicate(timeout=30)[1].count("\n"), process.returncode), (1, code))
            self.nothing_is_left()

    def test_remove_leaves_what_is_not_of_the_package(self):
        self.assertEqual((self.rlhf("setup").code, self.rlhf("x").code), (0, 0))
        (self.cache / "venvs").mkdir()
        ran = self.rlhf("setup", "--remove")
        self.assertEqual(ran.code, 0, ran.err)
        self.assertIn("removed ~/cache/libtorch-2.11.0 (", ran.err)
        self.assertEqual([path.name for path in self.cache.iterdir()], ["venvs"])
        (self.cache / "venvs").rmdir()
        self.assertIn("nothing to remove in ~/cache", self.rlhf("setup", "--remove").err)
        self.assertFalse(self.cache.exists())

    def test_a_wrong_flag_is_an_error(self):
        self.one_error(self.rlhf("setup", "--device", "tpu"), "--device", "'tpu'", "rlhf setup --help", code=2)
        self.one_error(self.rlhf("setup", "--remov"), "--remov", code=2)


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    program = Path(sys.argv.pop(1))
    with tempfile.TemporaryDirectory(prefix="rlhf-wheel-") as folder:
        prepare(program, Path(folder).resolve())
        result = unittest.main(exit=False, verbosity=1).result
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
