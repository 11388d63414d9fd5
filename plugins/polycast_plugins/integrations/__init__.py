"""polycast in Lightning, transformers and Accelerate; each module imports only its own library."""
