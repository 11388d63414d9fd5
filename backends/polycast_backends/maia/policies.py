"""The op table of Maia: torch's list for accelerators, unchanged."""

from polycast.plugin import STANDARD_POLICIES

POLICIES = STANDARD_POLICIES
