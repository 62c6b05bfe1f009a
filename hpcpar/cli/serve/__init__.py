"""`hpcpar serve runs/tiny`: a trained model that answers, by vLLM with OpenAI's interface.

run → exported model → checks → vLLM in its own environment → one answer → "ready" → ends with this process
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from hpcpar.errors import ConfigError, HpcparError

RUNS = Path("runs")
DTYPES = ("float32", "bfloat16", "float16")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN] [OPTIONS OF VLLM]...")
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Ranks that each layer is divided among.",
)
@click.option(
    "--pp",
    "--pipeline-parallel-size",
    "pp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Stages of layers, on GPUs.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: other hosts may ask, too.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one.")
@click.option(
    "--name", "--served-model-name", "name", help="By which requests ask for it [default: the run's]."
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Of parameters and arithmetic [default: as trained]."
)
@click.option("--max-model-len", type=click.IntRange(min=1), help="Longest prompt and answer, in tokens.")
@click.option("--kv-cache-memory-bytes", type=click.IntRange(min=1), help="On each rank.")
@click.option("--python", type=click.Path(path_type=Path), help="Interpreter of the environment with vLLM.")
@click.option("--dry-run", is_flag=True, help="Export, check, and show vLLM's command.")
def serve(words: tuple[str, ...], **options: Any) -> None:
    """Serve a trained model until a signal (Ctrl-C, SIGTERM) ends it.

    RUN is the output directory of `hpcpar train`, a checkpoint, or a model directory in Hugging Face's
    format; the newest run below runs/ where it is left out. Options that are not listed go to vLLM as they
    are. vLLM is that of --python, else of this Python, else of .venv-serve (`make install-serve`).

    Prints "ready" and a command to ask with, once the model has answered. vLLM's log goes where this goes.
    With a key in VLLM_API_KEY only those who have it may ask.
    """
    try:
        _serve(words, **options)
    except HpcparError as error:
        raise click.ClickException(f"hpcpar serve: {error}") from error


def _serve(
    words: tuple[str, ...],
    *,
    host: str,
    port: int,
    name: str | None,
    python: Path | None,
    dry_run: bool,
    **asked: Any,
) -> None:
    from hpcpar.cli.serve import vllm_environment as vllm
    from hpcpar.cli.serve.served_model import last_run, served_model
    from hpcpar.cli.serve.server import free_address, serve_until_asked_to_end

    run, others = _divided(words)
    engine = vllm.find_engine(python, Path.cwd())
    if engine.on_cpu and asked["kv_cache_memory_bytes"] is None:
        asked["kv_cache_memory_bytes"] = vllm.kv_cache_space(os.environ)
    request = vllm.ServeOptions(**asked, others=others)
    free_address(host, port, "")
    model = served_model(run or last_run(RUNS), dtype=request.dtype)
    vllm.require_capable(engine, model, request)
    address = free_address(host, port, name or model.name, os.environ.get("VLLM_API_KEY"))
    command = vllm.command(engine, model, address, request)
    environ = vllm.variables(engine, request, os.environ)
    click.echo(f"vLLM {engine.version} serves {address.model}: {model.origin}")
    click.echo(shlex.join([*vllm.shown_variables(engine, environ), *command]))
    if not dry_run:
        serve_until_asked_to_end(command, environ, address, click.echo)


def _divided(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the run, if the first word names one, and vLLM's words."""
    if words and not words[0].startswith("-"):
        return Path(words[0]), words[1:]
    if words and Path(words[-1]).is_dir():
        raise ConfigError(f"name the run first, then options of vLLM: hpcpar serve {words[-1]} {words[0]} …")
    return None, words
