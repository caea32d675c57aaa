"""Runs the notebooks of examples/notebooks, with short runs.

    PYTHON tests/python/test_notebooks.py PROGRAM [unittest's arguments]

PYTHON is that of an environment with nbclient and ipykernel, and PROGRAM the built `rlhf`. RLHF_WHOLE=1 leaves the runs as long as they
are. No network.
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support
from support import ROOT, Case

SHORT = f"import sys\nsys.path[:0] = [{str(Path(__file__).resolve().parent)!r}]\nimport support\nsupport.short_runs().__enter__()"


class Notebooks(Case):
    def execute(self, name):
        import nbclient
        import nbformat

        # Notebooks name the data of the example beside them.
        (self.folder / "notebooks").mkdir()
        (self.folder / "sentiment").symlink_to(ROOT / "examples/sentiment")
        notebook = nbformat.read(ROOT / "examples/notebooks" / name, as_version=4)
        if not os.environ.get("RLHF_WHOLE"):
            notebook.cells.insert(0, nbformat.v4.new_code_cell(SHORT))
        os.environ["IPYTHONDIR"] = str(self.folder / "ipython")
        nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(self.folder / "notebooks")}}).execute()
        if folder := os.environ.get("RLHF_NOTEBOOKS"):
            nbformat.write(notebook, Path(folder) / name)
        shutil.rmtree(self.folder / "notebooks/runs")
        return [output for cell in notebook.cells for output in cell.get("outputs", [])]

    def check(self, name):
        outputs = self.execute(name)
        pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
        self.assertTrue(any("<progress" in page and "done" in page for page in pages), "a bar")
        self.assertTrue(any("<th>step</th>" in page for page in pages), "a table of metrics")
        self.assertTrue(any("<iframe" in page for page in pages), "the report")
        texts = "".join(output.get("text", "") for output in outputs)
        self.assertNotIn('{"step"', texts, "lines of metrics beside the table")

    def test_grpo_with_a_function(self):
        self.check("grpo_with_a_function.ipynb")

    def test_an_interrupt_of_the_kernel_stops_after_the_update_and_the_run_resumes(self):
        from jupyter_client.manager import start_new_kernel

        kernel, client = start_new_kernel(cwd=str(self.folder))
        self.addCleanup(kernel.shutdown_kernel, now=True)
        self.addCleanup(client.stop_channels)
        code = f"""{SHORT.replace("support.short_runs().__enter__()", "")}
import rlhf, time
async def slow(completions, trainer_state, **kwargs):
    print("at", trainer_state.global_step)
    time.sleep(0.2)
    return [float(len(text)) for text in completions]
trainer = rlhf.GRPOTrainer(support.POLICY, slow, support.grpo("out", max_steps=12), support.PROMPTS)
"""

        def run(text, interrupt_at=None):
            """What a cell prints, and how it ends."""
            heard = []

            def hear(message):
                heard.append(message["content"])
                if interrupt_at and interrupt_at in message["content"].get("text", ""):
                    kernel.interrupt_kernel()

            reply = client.execute_interactive(text, timeout=120, output_hook=hear)["content"]
            return "".join(content.get("text", "") for content in heard), reply

        self.assertEqual(run(code)[1]["status"], "ok")
        _, reply = run("trainer.train()", interrupt_at="at 2")
        self.assertEqual((reply["status"], reply.get("ename")), ("error", "KeyboardInterrupt"))
        self.assertIn("trainer.train(resume_from_checkpoint=True) continues after update", reply["evalue"])
        text, reply = run("print(trainer.train(resume_from_checkpoint=True).global_step)")
        self.assertEqual(reply["status"], "ok", reply)
        self.assertTrue(text.endswith("12\n"), text[-200:])
        self.assertNotIn("at 0", text)

    def test_ppo_on_sentiment(self):
        self.check("ppo_on_sentiment.ipynb")


if __name__ == "__main__":
    support.main(__doc__)
