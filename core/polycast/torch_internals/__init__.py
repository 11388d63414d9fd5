"""Everything of torch's that is private: what polycast reads, and what it changes until ``uninstall()``."""
