"""The op table of MTIA: torch's list for accelerators, unchanged."""

from polycast.plugin import STANDARD_POLICIES

POLICIES = STANDARD_POLICIES
