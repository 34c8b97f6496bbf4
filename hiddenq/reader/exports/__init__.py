"""What trainers load, made from a run.

Consumes a `Run`, produces folders (or prefixes of a bucket) in the layouts of speculators, SpecForge, Model-Optimizer,
EAGLE-1/2 and NeMo Automodel's DSpark; imports none of them.

    settings.py      what is asked for              exporter.py    order, resume, statement
    piece.py         one object, read and saved     vocabulary.py  draft vocabulary
    files.py  speculators.py  dspark.py             the formats
"""

from hiddenq.reader.exports.exporter import STATEMENT, ExportReport, ExportStatement, export
from hiddenq.reader.exports.settings import FORMATS, ExportSettings, Format

__all__ = ["FORMATS", "STATEMENT", "ExportReport", "ExportSettings", "ExportStatement", "Format", "export"]
