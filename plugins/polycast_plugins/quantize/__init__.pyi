from .calibration import CalibratedWeight as CalibratedWeight
from .compensation import compensate_errors as compensate_errors
from .low_bit_matmul import LowBitMatmul as LowBitMatmul
from .low_bit_recipes import LowBitRecipe as LowBitRecipe
from .products import Products as Products
