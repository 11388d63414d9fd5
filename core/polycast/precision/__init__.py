"""Which precision a model needs: where a region's errors come from, and what must stay in float32."""
