"""Colours and layout that drawings share; they stand in `sinkscope.files.style`, above everything that draws."""

from __future__ import annotations

from sinkscope.files.style import BAND as BAND
from sinkscope.files.style import BLUE as BLUE
from sinkscope.files.style import COLOURS as COLOURS
from sinkscope.files.style import GREEN as GREEN
from sinkscope.files.style import GREY as GREY
from sinkscope.files.style import LINE_OF_TITLE as LINE_OF_TITLE
from sinkscope.files.style import ORANGE as ORANGE
from sinkscope.files.style import PIXELS_PER_CHARACTER as PIXELS_PER_CHARACTER
from sinkscope.files.style import RED as RED
from sinkscope.files.style import finished as finished
from sinkscope.files.style import panels as panels
from sinkscope.files.style import unfolded as unfolded
