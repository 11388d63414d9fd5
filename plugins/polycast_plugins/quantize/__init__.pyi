from .equalization import EqualizedWeight as EqualizedWeight
from .low_bit_matmul import LowBitMatmul as LowBitMatmul
from .low_bit_recipes import LowBitRecipe as LowBitRecipe
from .products import Products as Products
