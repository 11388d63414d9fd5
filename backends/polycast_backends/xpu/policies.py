"""The op table of XPU: torch's list for accelerators, unchanged."""

from polycast.plugin import STANDARD_POLICIES

POLICIES = STANDARD_POLICIES
