"""``compare`` and ``tune``: the errors of a region by module, and the modules or ops that must stay in float32."""
