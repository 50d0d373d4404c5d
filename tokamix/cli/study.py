"""`tokamix study`: the papers' claims and fair comparisons as experiments."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tokamix.cli._shared import console, plain_errors

if TYPE_CHECKING:
    from tokamix.study import Study


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Studies, or YAML files. Without a name, the studies are listed."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SOURCE: where a data set of the study is, as for `tokamix train`; repeatable."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time. Default: 8 on a GPU, 1 on a CPU.")] = None,
    deadline: Annotated[
        float | None, typer.Option(min=1, help="Stop after this many seconds; running trainings save their state.")
    ] = None,
    only: Annotated[str, typer.Option(help="Arms that match one of these patterns, such as 'column_*,time_*'.")] = "*",
    plan: Annotated[
        bool, typer.Option("--plan", help="List the runs that are left, and their cost; train none.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Measure speed and memory of the arms instead, one by one.")
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of NAME.csv.")] = Path("results/studies"),
    runs: Annotated[Path | None, typer.Option(help="Folder for the runs. Default: runs/studies.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the page of this study, or of all studies, here.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw a comparison as a PNG file here.")] = None,
    mps: Annotated[bool, typer.Option(help="Share the GPU through NVIDIA's multi-process service.")] = True,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
) -> None:
    """Run studies, or what is left of them: arms x seeds, several trainings at a time, a CSV row for each.

    If it is stopped, the same command resumes it; finished runs are never repeated.
    """
    with plain_errors():
        from tokamix.files import write_text
        from tokamix.study import load_study, render_page, run_study

        if not names and page is None:
            _list_studies(output)
            return
        if page is not None:
            write_text(page, render_page(output, names or None))
            console.print(f"wrote {page}", soft_wrap=True)
        studies = [load_study(name) for name in names or ()]
        if figure is not None:
            from tokamix.study.figure import draw_figure

            if len(studies) != 1:
                raise ValueError(f"--figure draws one study, but {len(studies)} are given")
            draw_figure(studies[0], figure, output)
            console.print(f"wrote {figure}", soft_wrap=True)
        elif plan:
            _print_plan(studies, output, only, jobs)
        elif speed:
            from tokamix.study.speed import measure_speeds

            for study in studies:
                measure_speeds(study, output, runs, device=device, deadline=deadline, only=only, say=_say)
        elif page is None:
            options = {"jobs": jobs, "mps": mps, "device": device, "deadline": deadline, "only": only, "say": _say}
            run_study(studies, dict(map(_parse_source, data or ())), output, runs, **options)  # type: ignore[arg-type]
            _print_plan(studies, output, only, jobs)


def _say(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _parse_source(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not (name and equals and source):
        raise ValueError(f"--data {text!r} is not NAME=SOURCE, such as cifar100=cifar100_train.npz,cifar100_test.npz")
    return name, source


def _list_studies(output: Path) -> None:
    from tokamix.study import list_studies, load_study
    from tokamix.study.cost import expected_costs
    from tokamix.study.rows import read_all_rows, read_rows

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("study", "arms", "rows", "GPU minutes left", "about"):
        table.add_column(title)
    for name in list_studies():
        study = load_study(name)
        speeds = read_rows(output / f"{name}_speed.csv")
        least, most = (cost.minutes for cost in expected_costs(study, read_all_rows(output, name), speeds))
        rows = len(read_rows(output / f"{name}.csv"))
        table.add_row(name, str(len(study.arms)), str(rows), f"{least:.0f} to {most:.0f}", study.title)
    console.print(table)


def _print_plan(studies: "Sequence[Study]", output: Path, only: str, jobs: int | None) -> None:
    from tokamix.study.cost import JOBS, expected_costs
    from tokamix.study.networks import check_networks
    from tokamix.study.plan import list_jobs, resolution, verdicts
    from tokamix.study.rows import read_all_rows, read_rows
    from tokamix.study.run import gpu_is_there

    processes = jobs or (JOBS if gpu_is_there() else 1)
    for study in studies:
        check_networks(study, only)
        if len(studies) > 1:
            _say(f"{study.name}:")
        rows, speeds = read_all_rows(output, study.name), read_rows(output / f"{study.name}_speed.csv")
        for job in list_jobs(study, rows, speeds, only):
            factor = f" lr x {job.lr_factor:g}" if job.phase == "tune" else ""
            _say(f"can start: {job.phase} {job.arm} seed {job.seed}{factor}")
        costs = expected_costs(study, rows, speeds, only, processes)
        for cost, text in zip(costs, ("with the seeds wanted now", "if every claim needs all seeds"), strict=True):
            work = f"{cost.gpu_minutes:.1f} GPU minutes"
            _say(f"left: {cost.runs} runs, {work}, {cost.minutes:.1f} minutes with {processes} at a time, {text}")
        if line := resolution(study):
            _say(line)
        for verdict in verdicts(study, rows, speeds):
            ours = f" {verdict.estimate.value:+.2f} ± {verdict.estimate.interval():.2f}" if verdict.estimate else ""
            _say(f"{verdict.claim.claim}: printed {verdict.claim.printed}, ours{ours or ' -'}: {verdict.text}")
