"""The op table of XPU: torch's list for accelerators, as it is."""

from polycast import STANDARD_POLICIES

POLICIES = STANDARD_POLICIES
