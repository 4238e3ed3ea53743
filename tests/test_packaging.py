"""The package as a whole: what its README promises to CI, what importing it costs, which way its imports point."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import epoch_moe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(epoch_moe.__file__).resolve().parent
SOURCE = ROOT / "src" / "epoch_moe"

# The core knows torch, einops and triton only, so that a serving stack can import it without any Hugging Face library.
CORE = (
    "routing", "config", "block", "plan", "freshlane", "experts", "kernels", "residency", "tables", "tensor_files",
    "checks", "precision", "functional", "spec", "worklist",
)  # fmt: skip
HUGGING_FACE = ("transformers", "accelerate", "tokenizers", "huggingface_hub")


def run_python(code: str) -> str:
    """Run ``code`` in a fresh interpreter that sees this one's package; its stdout."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE.parent), env.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def core_files(package: Path = SOURCE) -> list[Path]:
    files: list[Path] = []
    for name in CORE:
        files += [package / f"{name}.py"] if (package / f"{name}.py").exists() else []
        files += sorted((package / name).rglob("*.py"))
    return files


def module_name(file: Path, package: Path = SOURCE) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Dotted names that the imports anywhere in ``tree`` may load, relative ones resolved."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            # `from epoch_moe import patching` loads epoch_moe.patching.
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def is_core(name: str) -> bool:
    return any(within(name, f"epoch_moe.{core}") for core in CORE)


# README, CI script, metadata


def load_readme_block() -> ModuleType:
    module = ModuleType("readme_block")
    path = ROOT / ".ci" / "readme_block.py"
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def test_readme_commands() -> None:
    readme_block = load_readme_block().readme_block
    run, test = readme_block("run"), readme_block("test")
    assert re.search(r"pip install -c constraints-cpu\.txt \.( |$)", run), run
    assert " epoch-moe compare " in run, run
    assert re.search(r"pip install -c constraints-cpu\.txt '\.\[test\]'", test), test
    assert 'python -m pytest -n 2 -m "not slow"' in test, test


def test_ci_takes_its_commands_from_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name in ("run", "test"):
        assert f"{name}_command=$(python3 .ci/readme_block.py {name})" in script
        assert re.search(rf'^section .* readme "\${name}_command"$', script, re.MULTILINE)
    assert "epoch-moe " not in script, "a command of the README is repeated in .ci/run"


@pytest.mark.parametrize(
    "text",
    [
        "no block",
        "<!-- ci: run -->\n\ntext between\n```bash\ntrue\n```\n",
        "<!-- ci: run -->\n```bash\ntrue\nfalse\n```\n",
        "<!-- ci: run -->\n```bash\n```\n",
        "<!-- ci: run -->\n```bash\ntrue\n```\n<!-- ci: run -->\n```bash\nfalse\n```\n",
        "<!-- ci: test -->\n```bash\ntrue\n```\n",
    ],
)
def test_readme_block_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md"):
        load_readme_block().readme_block("run", text)


def test_readme_block_finds() -> None:
    text = "a\n\n<!-- ci: test -->\n```bash\nfalse\n```\n\n<!-- ci: run -->\n```bash\necho 1 && true\n```\n"
    assert load_readme_block().readme_block("run", text) == "echo 1 && true"


def test_metadata_agrees_with_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["license_expression"] == "Apache-2.0"
    assert setup["metadata"]["version"] == "attr: epoch_moe.__version__"
    assert setup["options.entry_points"]["console_scripts"].strip() == "epoch-moe = epoch_moe.cli:main"
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", epoch_moe.__version__)
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_constraints_allow_what_setup_asks_for() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    pinned = {pin.name: next(iter(pin.specifier)) for pin in pins}
    assert all(specifier.operator == "==" for specifier in pinned.values())
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    asked = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    for requirement in map(Requirement, asked.split("\n")[1:]):
        if requirement.name in pinned:
            assert requirement.specifier.contains(pinned[requirement.name].version), requirement
        else:
            assert requirement.name == "triton", f"{requirement.name} is not pinned in constraints-cpu.txt"


def test_every_folder_with_modules_is_a_package() -> None:
    """`packages = find:` passes over a folder without __init__.py, and the wheel would lack its modules."""
    folders = {file.parent for file in SOURCE.rglob("*.py")}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]


@pytest.mark.slow
def test_wheel_ships_every_module_and_the_checkpoints(tmp_path: Path) -> None:
    # A copy, so that no build folder appears in the tree and none that is there is packed.
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("epoch_moe/")}
    package = source / "src" / "epoch_moe"
    expected = {f"epoch_moe/{file.relative_to(package).as_posix()}" for file in package.rglob("*") if file.is_file()}
    assert shipped == expected
    assert "epoch_moe/py.typed" in shipped


def test_package_ships_a_checkpoint() -> None:
    """Of the package that is being tested: in CI the installed one, not the source tree."""
    folders = {file.parent for file in (PACKAGE / "checkpoints").glob("*/*.safetensors")}
    assert folders, f"no checkpoint in {PACKAGE / 'checkpoints'}"
    assert all((folder / "config.json").exists() for folder in folders)
    assert (PACKAGE / "py.typed").exists()


# The cost of an import

IMPORT = """
import sys, time, torch
def refuse(*args, **kwargs):
    raise AssertionError("importing epoch_moe initialised CUDA")
torch.cuda._lazy_init = refuse
threads, default = torch.get_num_threads(), torch.get_default_dtype()
before = set(sys.modules)
start = time.process_time()
import epoch_moe
seconds = time.process_time() - start
assert not torch.cuda.is_initialized()
assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, default)
print(seconds, *sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_import_is_quick_loads_no_hugging_face_library_and_touches_no_gpu() -> None:
    # CPU seconds beyond torch, so that a busy machine does not count; twice at most, so that byte-compiling does not.
    seconds, *loaded = run_python(IMPORT).split()
    assert "epoch_moe" in loaded
    assert not set(HUGGING_FACE) & set(loaded)
    if float(seconds) >= 1.0:
        seconds = run_python(IMPORT).split()[0]
    assert float(seconds) < 1.0, f"import epoch_moe took {seconds} CPU seconds beyond torch"


# The direction of imports


def test_core_imports_without_hugging_face_libraries() -> None:
    files = core_files(PACKAGE)
    names = [module_name(file, PACKAGE) for file in files]
    if sys.platform != "linux":  # triton has wheels for Linux only
        names = [name for name in names if not within(name, "epoch_moe.kernels")]
    assert "epoch_moe.routing" in names
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in HUGGING_FACE)
    imports = "\n".join(f"importlib.import_module({name!r})" for name in names)
    loaded = run_python(f"import importlib, sys\n{blocked}\n{imports}\nprint(*sys.modules)").split()
    above = {name for name in loaded if name.startswith("epoch_moe.") and not is_core(name)}
    assert not above, f"importing the core loaded {sorted(above)}"


@pytest.mark.parametrize("file", core_files(), ids=module_name)
def test_core_imports_point_downwards(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    names = imported_names(tree, module_name(file), file.name == "__init__.py")
    wrong = {name for name in names if name.startswith("epoch_moe.") and not is_core(name)}
    wrong |= {name for name in names for library in HUGGING_FACE if within(name, library)}
    assert not wrong, f"{file.relative_to(ROOT)} is core, but imports {sorted(wrong)}"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Names that reach each other along the arrows, in groups."""

    def reached(name: str) -> set[str]:
        found, waiting = set(), [name]
        while waiting:
            new = arrows.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in arrows}
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in arrows}
    return [list(group) for group in sorted(groups) if group]


def test_no_imports_go_in_circles() -> None:
    """Between files, nor between folders, at run time, for typing or within a function; the package's head aside."""
    sources = {module_name(file): file for file in SOURCE.rglob("*.py")}
    files: dict[str, set[str]] = {}
    parts: dict[str, set[str]] = {}
    for name, file in sources.items():
        if name == "epoch_moe":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = imported_names(tree, name, file.name == "__init__.py")
        files[name] = (names & sources.keys()) - {name, "epoch_moe"}
        part = name.split(".")[1]
        parts.setdefault(part, set()).update({other.split(".")[1] for other in files[name]} - {part})
    assert len(files) > 100 and files["epoch_moe.block"] and parts["plan"]
    assert circles(files) == [] and circles(parts) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}) == [["a", "b"], ["c", "d"]]


def test_imported_names_resolves_relative_imports() -> None:
    tree = ast.parse("from . import a\nfrom ..patching import patch\nfrom epoch_moe import cli\nimport x.y")
    names = imported_names(tree, "epoch_moe.plan.atlas", is_package=False)
    assert {"epoch_moe.plan.a", "epoch_moe.patching.patch", "epoch_moe.patching", "epoch_moe.cli", "x.y"} <= names
    for code, package in (("from .. import cli", "epoch_moe.plan"), ("from . import cli", "epoch_moe")):
        assert "epoch_moe.cli" in imported_names(ast.parse(code), package, is_package=True)
