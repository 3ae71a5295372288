"""Writes reports to files, and compares them with an earlier run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from mlakit.tools.bench import charts
from mlakit.tools.bench.compare import Comparison, compare, comparison_table
from mlakit.tools.bench.heatmap import heat_maps, heat_table
from mlakit.tools.bench.json_fields import FieldError
from mlakit.tools.bench.report import WALL, Report, as_csv
from mlakit.tools.bench.tables import left_out_lines, table
from mlakit.tools.columns import wide_console


@dataclass(frozen=True)
class Outputs:
    """Files to write, and a report to compare with; None if not requested."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None  # a folder
    earlier: Path | None = None

    def check(self) -> None:
        """Raises ValueError, before the run, for files that cannot be used."""
        taken: dict[Path, str] = {}
        for option, file in self._targets().items():
            if not file.parent.is_dir():
                raise ValueError(f"{option}: there is no folder {file.parent}")
            other = taken.setdefault(file.resolve(), option)
            if other != option and not file.is_char_device():
                raise ValueError(f"{other} and {option} both name {file}")
        if self.plot is not None and (reason := charts.why_not()):
            raise ValueError(f"--plot {reason}")
        if self.earlier is not None:
            read_reports("--compare", self.earlier)

    def _targets(self) -> dict[str, Path]:
        named = {"--json": self.json, "--csv": self.csv, "--plot": self.plot}
        return {option: file for option, file in named.items() if file is not None}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Raises ValueError, naming the option, for a target that cannot be written.

        Existing files keep their contents until `write`. New files are created, and removed again
        if the block fails while they are empty.
        """
        made: list[Path] = []
        try:
            for option, file in self._targets().items():
                is_new = not file.exists()
                try:
                    if file == self.plot:
                        file.mkdir(exist_ok=True)
                        TemporaryFile(dir=file).close()
                    else:
                        file.open("ab").close()
                except OSError as error:
                    reason = error.strerror or type(error).__name__
                    raise ValueError(f"{option}: {file} cannot be written, {reason}") from None
                made += [file] * is_new
            yield
        except BaseException:
            for file in made:
                if file.is_dir():
                    with suppress(OSError):  # not empty
                        file.rmdir()
                elif file.stat().st_size == 0:
                    file.unlink()
            raise

    def write(self, reports: Sequence[Report]) -> None:
        """Write the requested files and print the comparison."""
        if self.earlier is not None:
            _print_comparison(compare(read_reports("--compare", self.earlier), reports))
        if self.json is not None:
            stored = [each.as_json() for each in reports]
            found = stored if len(stored) > 1 else stored[0]
            self.json.write_text(f"{json.dumps(found, indent=2, ensure_ascii=False)}\n", "utf-8")
        if self.csv is not None:
            self.csv.write_text(as_csv(reports), "utf-8")
        if self.plot is not None:
            self.plot.mkdir(exist_ok=True)
            for report in reports:
                charts.save_charts(report, self.plot)


def read_reports(option: str, file: Path) -> list[Report]:
    """The reports in a --json file. Raises ValueError, naming `option`, if it is none."""
    try:
        stored = json.loads(file.read_text("utf-8"))
        reports = stored if isinstance(stored, list) else [stored]
        if not reports:
            raise ValueError("has no report of mlakit bench")
        return [Report.from_json(each) for each in reports]
    except OSError as error:
        raise ValueError(f"{option}: {file} cannot be read, {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{option}: {file} is not JSON") from None
    except RecursionError:
        raise ValueError(f"{option}: {file} is nested too deeply for a report") from None
    except FieldError as error:
        raise ValueError(f"{option}: {file}: {error}") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{option}: {file} is no report of mlakit bench, {error}") from None
    except ValueError as error:
        raise ValueError(f"{option}: {file} {error}") from None


def print_reports(reports: Sequence[Report]) -> None:
    """Print the tables of stored reports, as the runs did."""
    console = wide_console()
    for report in reports:
        console.print(
            f"{report.suite} ({report.mode}): {report.command}", highlight=False, markup=False
        )
        unit = "ms" if report.mode == WALL else "us"
        is_quick = "--quick" in report.command.split()
        console.print(table(report.rows, unit, console.width, is_quick=is_quick))
        for line in left_out_lines(report.left_out):
            console.print(line, markup=False)
        for heat in heat_maps(report.rows):
            console.print(heat_table(heat))


def _print_comparison(comparison: Comparison) -> None:
    console = wide_console()
    console.print(comparison_table(comparison, console.width))
    console.print(comparison.summary, highlight=False, markup=False)
