"""The quickstart notebook runs in a real kernel, shows what direct calls give, and its cells can be run twice."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from ipykernel.kernelspec import install
from nbclient import NotebookClient
from nbformat import NotebookNode

import epoch_moe
from epoch_moe import EpochConfig, generate, load_model, patch
from epoch_moe.decoding import BlockDiffusionOutput
from epoch_moe.report import work_table

pytestmark = pytest.mark.timeout(400)  # the first test waits for the kernel: 12 s alone, more on a busy machine

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"

# Run behind the notebook's own cells, in its kernel: the values behind what they showed.
PROBE = """
import json, sys
supports, shares, experts, colourbar = figure.axes
print(json.dumps({
    "executable": sys.executable,
    "package": epoch_moe.__file__,
    "texts": texts,
    "tokens": {name: globals()[name].sequences.tolist() for name in ("dense", "planned", "exact")},
    "right": {side: result[side]["accuracy"] for side in ("dense", "plan")},
    "agreement": result["agreement"],
    "bars": [bar.get_height() for bar in supports.patches],
    "lines": {line.get_label(): list(line.get_ydata()) for line in shares.lines},
    "image": [[int(n) for n in row] for row in experts.images[1].get_array().filled(0)],
    "support": [[int(n) for n in row] for row in (~experts.images[0].get_array().mask)],
    "titles": [axes.get_title() for axes in (supports, shares, experts)],
    "patched": "_epoch_moe" in model.__dict__,
}))
"""


def read_notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@dataclass
class Run:
    """The executed notebook: cell ids, those of the second runs with "-again" behind them, and the values behind it."""

    cells: dict[str, NotebookNode]

    def printed(self, name: str, stream: str = "stdout") -> str:
        outputs = self.cells[name].outputs
        return "".join(out.text for out in outputs if out.output_type == "stream" and out.name == stream)

    def shown(self, name: str, kind: str) -> str:
        """The value of the cell's last expression, as this MIME type."""
        (output,) = [output for output in self.cells[name].outputs if output.output_type == "execute_result"]
        return output.data[kind]

    @property
    def values(self) -> dict[str, Any]:
        return json.loads(self.printed("probe"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The notebook in a fresh kernel of this interpreter, in an empty folder, every cell run twice in a row."""
    notebook = read_notebook()
    cells: list[NotebookNode] = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "code":
            cells.append(nbformat.v4.new_code_cell(cell.source, id=f"{cell.id}-again"))
    notebook.cells = [*cells, nbformat.v4.new_code_cell(PROBE, id="probe")]
    home, folder = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("empty")
    install(prefix=str(home))
    package = str(Path(epoch_moe.__file__).resolve().parent.parent)
    with pytest.MonkeyPatch.context() as patches:
        # In front of whatever kernel named python3 the machine may have.
        patches.setenv("JUPYTER_PATH", str(home / "share" / "jupyter"))
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
            patches.setenv(name, str(home / name))
        patches.setenv("PYTHONPATH", os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
        patches.setenv("HF_HUB_OFFLINE", "1")
        resources = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=100, kernel_name="python3", resources=resources).execute()
    assert not list(folder.iterdir()), "the notebook left files behind"
    return Run({cell.id: cell for cell in notebook.cells})


@pytest.fixture(scope="module")
def direct(run: Run) -> dict[str, Any]:
    """The same calls in this process."""
    model, tokenizer = load_model("tiny-llada2")
    report = patch(model)
    prompts = [tokenizer(text)["input_ids"] for text in run.values["texts"]]
    plans = {"dense": None, "planned": EpochConfig(), "exact": EpochConfig.exact()}
    outputs = {name: generate(model, prompts, gen_length=64, plan=plan) for name, plan in plans.items()}
    slow = generate(model, prompts[1], gen_length=64, threshold=1.0, record=True)
    return {"config": model.config, "report": report, "outputs": outputs, "slow": slow}


def test_it_is_stored_without_outputs() -> None:
    """Outputs would age, and differ between machines in the last digit; running it takes seconds."""
    notebook = read_notebook()
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(home|tmp|Users|root|work|mnt)/|[A-Z]:\\\\", text), "a path of one machine"


def test_every_cell_runs_twice_without_a_word_of_complaint(run: Run) -> None:
    names = [cell.id for cell in code_cells(read_notebook())]
    assert all(run.printed(name, "stderr") == "" for cell in names for name in (cell, f"{cell}-again"))
    assert "MoE layers patched" in run.shown("patch", "text/html")
    assert "MoE layers updated" in run.shown("patch-again", "text/html")
    for name in ("generate", "exact", "unpatch"):
        assert run.printed(name) == run.printed(f"{name}-again") != ""
    for name, kind in (("table", "text/html"), ("figure", "image/png")):
        assert run.shown(name, kind) == run.shown(f"{name}-again", kind)


def test_it_runs_this_package(run: Run) -> None:
    assert run.values["executable"] == sys.executable
    assert os.path.samefile(run.values["package"], epoch_moe.__file__)


def test_answers_are_those_of_direct_calls(run: Run, direct: dict[str, Any]) -> None:
    assert run.shown("patch", "text/html") == direct["report"]._repr_html_()
    outputs: dict[str, BlockDiffusionOutput] = direct["outputs"]
    assert run.values["tokens"] == {name: out.sequences.tolist() for name, out in outputs.items()}
    assert torch.equal(outputs["exact"].sequences, outputs["dense"].sequences)
    assert run.printed("exact").split().count("True") == 2
    assert run.printed("generate").splitlines() == [
        "sum 3 6 5 4 2: 3+6=9+5=14+4=18+2=20 so 20",
        "work out 6+4+5-4-4+4+8-5: 6 10 15 11 7 11 19 14",
        "work out 3+8+2-3+4-9-1+7: 3 11 13 10 14 5 4 11",
        "reverse 6 7 3 9 9 2 9: 9 2 9 9 3 7 6",
    ]


def test_tables_are_those_of_direct_calls(run: Run, direct: dict[str, Any]) -> None:
    dense, planned = (direct["outputs"][name].counters.read() for name in ("dense", "planned"))
    table = work_table(direct["config"], {"dense": dense, "default plan": planned})
    assert run.shown("table", "text/html") == table._repr_html_()
    assert run.shown("table", "text/plain") == str(table)
    # The comparison is printed from its result, and the plan does what it is there for.
    text, values = run.printed("compare"), run.values
    assert f"{values['right']['dense']:.1%}" in text and f"{values['agreement']:.1%} of 40 problems" in text
    assert min(*values["right"].values(), values["agreement"]) >= 0.9


def test_the_figure_shows_the_decode(run: Run, direct: dict[str, Any]) -> None:
    png = base64.b64decode(run.shown("figure", "image/png"))
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    values, slow = run.values, direct["slow"]
    assert values["titles"] == ["Support per layer", "Rows per forward", "Experts of MoE layer 2, block 1"]
    sizes = [layer.support_size for layer in slow.counters.read().per_layer]
    assert values["bars"] == pytest.approx(sizes, nan_ok=True)  # nan: no support of the layer was kept
    history = list(slow.counters.history)
    for name in ("fresh", "live"):
        assert values["lines"][name] == pytest.approx([100 * entry[name] / entry["rows"] for entry in history])
    begin = [place for place, entry in enumerate(history) if entry["forward"] == 0][1]
    pairs_DE, support_DE = (what[begin:, -1] for what in slow.counters.recorder.read())
    image_UD, support_UD = torch.tensor(values["image"]), torch.tensor(values["support"])
    # It is the last layer: four experts for every live row. The lines of the image are the experts that were used.
    assert image_UD.sum(dim=0).tolist() == [4 * entry["live"] for entry in history[begin:]]
    assert sorted(line for line in image_UD.tolist() if any(line)) == sorted(
        line for line in pairs_DE.T.tolist() if any(line)
    )
    assert support_UD.sum(dim=0).tolist() == support_DE.sum(dim=1).tolist()


def test_unpatch_gives_the_original_back(run: Run) -> None:
    assert run.printed("unpatch").splitlines() == [
        "EpochMoEBlock",
        "LLaDA2MoeSparseMoeBlock",
        "the original model gives the same tokens: True",
    ]
    assert run.values["patched"] is False
