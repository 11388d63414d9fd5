"""The op table of Maia: torch's list for accelerators, as it is."""

from polycast import STANDARD_POLICIES

POLICIES = STANDARD_POLICIES
