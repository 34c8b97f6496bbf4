"""One way to say a panel, so that none is without unit, description, link or empty state.

Invariant: a `Panel` is plain data; `to_builder` is the only place that knows the SDK. Queries use the variables `$run`,
`$host` and `$gpu`, whose "All" is `.*`, and `$__rate_interval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder as SdkBuilder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLink as LinkModel,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.builder.provisioning import DATASOURCE_UID

DATASOURCE = DataSourceRef(type_val="prometheus", uid=DATASOURCE_UID)
Link = SdkBuilder[LinkModel]
Builder = stat.Panel | table.Panel | timeseries.Panel | statetimeline.Panel


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: what it shows, in which unit, and what it says while there is nothing to show."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    """Expression and legend."""
    unit: str
    """A unit of Grafana's: `short`, `bytes`, `Bps`, `s`, `percentunit`, `cps`, …"""
    kind: Literal["series", "stacked", "stat", "table", "states"] = "series"
    empty: str = "nothing yet"
    width: int = 8
    height: int = 8
    bad_above: float | None = None
    bad_below: float | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A template variable: the values of a label."""

    name: str
    label: str
    query: str


RUN = Variable(name="run", label="Run", query="label_values(hiddenq_monitor_run_batches, run)")
HOST = Variable(name="host", label="Host", query="label_values(hiddenq_monitor_worker_up, host)")
GPU = Variable(
    name="gpu",
    label="GPU",
    query='label_values(hiddenq_monitor_worker_up{role="gpu_worker", host=~"$host"}, device)',
)


def build_dashboard(
    *, uid: str, title: str, description: str, variables: Sequence[Variable], sections: Sequence[Section]
) -> Dashboard:
    """A dashboard of the family: same tags, links, annotations and refresh as the others."""
    dashboard = (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["hiddenq"])
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .editable()
        .link(
            DashboardLink("hiddenq")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["hiddenq"])
            .keep_time(True)
            .include_vars(True)
        )
    )
    for variable in variables:
        dashboard.with_variable(_variable(variable))
    for annotation in _annotations():
        dashboard.annotation(annotation)
    number = 0
    for section in sections:
        dashboard.with_row(Row(section.title))
        for panel in section.panels:
            number += 1
            dashboard.with_panel(to_builder(panel, number, uid))
    return dashboard


def to_builder(panel: Panel, number: int, dashboard_uid: str) -> Builder:
    """The panel in the SDK's words."""
    made: Builder
    if panel.kind == "stat":
        made = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    elif panel.kind == "table":
        made = table.Panel()
    elif panel.kind == "states":
        made = statetimeline.Panel()
    else:
        made = _series(panel)
    made.id(number).title(panel.title).description(panel.description).unit(panel.unit).no_value(panel.empty)
    made.datasource(DATASOURCE).grid_pos(GridPos(h=panel.height, w=panel.width, x=0, y=0))
    made.thresholds(_thresholds(panel)).links(_links(dashboard_uid))
    for index, (expr, legend) in enumerate(panel.queries):
        query = Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + index)).datasource(DATASOURCE)
        if panel.kind == "table":
            query.instant().format(PromQueryFormat.TABLE)
        elif panel.kind == "stat":
            query.instant()
        else:
            query.range()
        made.with_target(query)
    return made


def _series(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM)
    legend.display_mode(LegendDisplayMode.TABLE).calcs(["lastNotNull", "mean"])
    made = timeseries.Panel().legend(legend).line_width(1).fill_opacity(8).min(0)
    made.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if panel.kind == "stacked":
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    return made


def _thresholds(panel: Panel) -> ThresholdsConfig:
    steps = [Threshold(value=None, color="green")]
    if panel.bad_below is not None:
        steps = [Threshold(value=None, color="red"), Threshold(value=panel.bad_below, color="green")]
    if panel.bad_above is not None:
        steps.append(Threshold(value=panel.bad_above, color="red"))
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _links(dashboard_uid: str) -> list[Link]:
    """From each panel to where one would look next."""
    following = {"hiddenq-fleet": "hiddenq-gpu", "hiddenq-gpu": "hiddenq-fleet", "hiddenq-uploads": "hiddenq-fleet"}
    uid = following.get(dashboard_uid, "hiddenq-gpu")
    url = f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}"
    return [DashboardLink("Look next").type(DashboardLinkType.LINK).url(url)]


def _variable(variable: Variable) -> QueryVariable:
    everything = VariableOption(text="All", value="$__all", selected=True)
    return (
        QueryVariable(variable.name)
        .label(variable.label)
        .query(variable.query)
        .datasource(DATASOURCE)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(everything)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


ANNOTATIONS = (
    ("Alerts", 'ALERTS{alertname=~"Hiddenq.*", alertstate="firing"}', "red"),
    ("Deploys", "hiddenq_monitor_build_info unless on (version) (hiddenq_monitor_build_info offset 5m)", "blue"),
    ("Workers joined", "hiddenq_monitor_worker_up unless on (target) (hiddenq_monitor_worker_up offset 2m)", "green"),
)
"""Name, expression, colour of what is marked on every graph."""


def _annotations() -> list[AnnotationQuery]:
    return [
        AnnotationQuery().name(name).expr(expr).icon_color(color).enable(True).datasource(DATASOURCE)
        for name, expr, color in ANNOTATIONS
    ]
