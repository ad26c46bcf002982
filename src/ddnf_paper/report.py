"""The report: one self-contained page with every claim, figure and table of the experiments that were run."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddnf.system import check_overwrite, require, write_atomic
from ddnf.viz import view
from ddnf_paper.experiment import Claim, Experiment, Picture, Record, ReportTable, resolution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GREY = "#7b828e"
_LARGEST_SVG = 150_000  # bytes; beyond, a figure is smaller as WebP


class Shown(NamedTuple):
    """A figure as the page embeds it; a wide one scrolls on a phone, so that it stays readable."""

    source: str
    caption: str
    alt: str
    wide: bool


class Section(NamedTuple):
    """An experiment with all that the page shows of it; without a record, `missing` says why."""

    experiment: Experiment
    record: Record | None = None
    missing: str = ""
    claims: Sequence[Claim] = ()
    tables: Sequence[ReportTable] = ()
    pictures: Sequence[Shown] = ()

    @property
    def seconds(self) -> str:
        """Duration of the run."""
        return _time(sum(self.record["seconds"].values())) if self.record else ""


def write(out: Path, *, experiments: Mapping[str, Experiment] | None = None) -> Path:
    """Writes OUT/report/index.html from the records OUT/NAME.json, and returns its path.

    Args:
        out: the folder that `ddnf reproduce` has written to.
        experiments: experiments to report on, in order; None for all.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(Path(folder), experiments={}).name
        'index.html'
    """
    if not out.is_dir():
        raise ValueError(f"Expected a folder with results, such as `ddnf reproduce` writes; got {str(out)!r}.")
    if experiments is None:
        from ddnf_paper.registry import EXPERIMENTS

        experiments = EXPERIMENTS
    path = out / "report" / "index.html"
    check_overwrite(path, kind="a report of ddnf", is_ours=view.is_page)
    text = _render([_section(experiment, out) for experiment in experiments.values()])
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, text)
    return path


def _render(sections: list[Section]) -> str:
    jinja2 = require("jinja2", "paper")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("ddnf_paper").joinpath("report.html.jinja").read_text("utf-8"))
    views = _views(sections)
    widget = view.widget(views) if views else None
    return template.render(sections=sections, widget=widget, policy=view.POLICY, text=_text)


def _section(experiment: Experiment, out: Path) -> Section:
    record = _record(out / f"{experiment.name}.json")
    if record is None:
        return Section(experiment, missing="not run yet")
    wanted = experiment.parts(experiment.profiles[record["profile"]], record["seed"])
    left = [name for name in wanted if name not in record["parts"]]
    if left and not (experiment.has_checkpoints and record["parts"]):
        return Section(experiment, missing=f"interrupted, {len(left)} of {len(wanted)} parts left")
    shown = [_shown(picture) for picture in experiment.pictures(record)]
    return Section(experiment, record, "", experiment.claims(record), experiment.tables(record), shown)


def _record(path: Path) -> Record | None:
    """The record of a run; None if there is none, or a file of another kind."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected the results of a run in {str(path)!r}; got {error}.") from error
    return found if isinstance(found, dict) and {"parts", "profile", "seed"} <= found.keys() else None


def _shown(picture: Picture) -> Shown:
    return Shown(_source(picture.figure), picture.caption, picture.alt, picture.figure.get_figwidth() > 7)


def _source(figure: "Figure") -> str:
    """A figure as a data URI: SVG if it is small, otherwise WebP. The same figure always gives the same text."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ddnf"}):
        figure.savefig(buffer, format="svg", metadata=dict(Date=None))
    kind = "svg+xml"
    if buffer.tell() > _LARGEST_SVG:
        kind, buffer = "webp", io.BytesIO()
        _clear_background(figure)
        figure.savefig(buffer, format="webp", dpi=resolution(figure), pil_kwargs=dict(quality=85))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _clear_background(figure: "Figure") -> None:
    """Makes a figure transparent, with frames and text in a grey that is read on a light page and on a dark one."""
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    for text in figure.findobj(Text):
        text.set_color(_GREY)
    for spine in figure.findobj(Spine):
        spine.set_edgecolor(_GREY)


def _views(sections: list[Section]) -> dict[str, dict[str, Any]]:
    """The frames in the records' parts, by the names of the experiment and the part."""
    return {
        f"{section.experiment.title}: {name}": part["view"]
        for section in sections
        if section.record
        for name, part in section.record["parts"].items()
        if "view" in part
    }


def _text(setting: Any) -> str:
    return setting if isinstance(setting, str) else json.dumps(setting)


def _time(seconds: float) -> str:
    """Formats a duration.

    Example:
        >>> _time(3.21), _time(200.0)
        ('3.2 s', '3 min 20 s')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
