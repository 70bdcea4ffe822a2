"""A stochastic cellular fire: wind, slope and fuel decide to which of its eight neighbours a burning cell spreads."""

import dataclasses

import numpy as np

FRAMES = 22  # masks per fire
BURN_ROUNDS = 9  # rounds of ignition during which a cell can ignite others
PIXELS_PER_ROUND = 16  # a frame has size / 16 rounds of ignition, so that fires grow alike at every size
RATE = 0.036  # probability per round on flat ground without wind, at full fuel
WIND_GAIN = 3.0  # exponent per speed and cosine
SLOPE_GAIN = 0.25  # exponent per unit of slope towards the neighbour
BARREN = 0.25  # fuel below this does not burn
START_RADIUS = 0.06  # of the burning disc in frame 0, in image sides
STEEPEST = 6.0  # slope that static data show as 1, in elevation ranges per image side
TURN = 0.35  # standard deviation of the change of direction per frame, in radians
GUST = 0.08  # standard deviation of the change of speed per frame
SPEEDS = (0.2, 1.0)
WAYS = np.array([(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1) if row or column])


@dataclasses.dataclass(frozen=True)
class Fire:
    """A simulated fire: masks bool [FRAMES, H, W] of all cells ignited so far, wind [FRAMES, 2], static [H, W, 3]."""

    masks: np.ndarray
    wind: np.ndarray
    static: np.ndarray


def simulate_fire(rng: np.random.Generator, size: int) -> Fire:
    """Simulates one fire on its own terrain; static channels are elevation, slope and fuel."""
    elevation, fuel = smooth_field(rng, size, waves=3), smooth_field(rng, size, waves=5)
    fuel = np.where(fuel < BARREN, 0.0, fuel)
    wind = changing_wind(rng)
    ground = ground_factors(fuel, elevation)
    age = np.where(_start(rng, fuel), 0, -1)  # rounds since ignition; -1 = has not burned
    masks = [age >= 0]
    for frame in range(FRAMES - 1):
        probabilities = spread_probabilities(ground, wind[frame])
        for _ in range(max(1, round(size / PIXELS_PER_ROUND))):
            burning = (age >= 0) & (age < BURN_ROUNDS)
            ignited = rng.random((size, size)) < ignition_probability(burning, probabilities)
            age[age >= 0] += 1
            age[ignited & (age < 0)] = 0
        masks.append(age >= 0)
    slope = np.clip(np.hypot(*np.gradient(elevation * size)) / STEEPEST, 0, 1)
    return Fire(np.stack(masks), wind.astype(np.float32), np.stack([elevation, slope, fuel], -1).astype(np.float32))


def ground_factors(fuel: np.ndarray, elevation: np.ndarray) -> np.ndarray:
    """Returns RATE / distance * fuel * exp(SLOPE_GAIN * slope) of each cell and way to it, [8, H, W].

    Distance is 1 or sqrt(2); slope is the rise along the way, in elevation ranges per image side.
    """
    distance = np.hypot(*WAYS.T)[:, None, None]
    slope = (elevation - _neighbours(np.pad(elevation, 1, mode="edge"))) * len(elevation) / distance
    return RATE / distance * fuel * np.exp(SLOPE_GAIN * slope)


def spread_probabilities(ground: np.ndarray, wind: np.ndarray) -> np.ndarray:
    """Returns the probability [8, H, W] that a burning neighbour ignites a cell in one round, by the way to the cell.

    It is min(1, ground * exp(WIND_GAIN * speed * cos(angle))), with the angle between the way from the neighbour to
    the cell and the way that the wind blows.

    Args:
      ground: factors of `ground_factors`.
      wind: [2], speed and the direction that the wind comes from, as in `fire_spec`.
    """
    comes_from = 2 * np.pi * wind[1]
    blows = np.array([np.cos(comes_from), -np.sin(comes_from)])  # rows grow southwards, columns eastwards
    cosine = WAYS @ blows / np.hypot(*WAYS.T)
    return np.minimum(1, ground * np.exp(WIND_GAIN * wind[0] * cosine)[:, None, None])


def ignition_probability(burning: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns the probability [H, W] that a cell ignites in one round, by at least one burning neighbour."""
    return 1 - np.prod(1 - probabilities * _neighbours(np.pad(burning, 1)), axis=0)


def smooth_field(rng: np.random.Generator, size: int, waves: int) -> np.ndarray:
    """Draws a field [size, size] that spans [0, 1]: twelve cosine waves of at most `waves` periods per side."""
    axis = (np.arange(size) + 0.5) / size
    frequency = rng.uniform(-waves, waves, (12, 2, 1, 1))
    height, phase = rng.standard_normal((12, 1, 1)), rng.uniform(0, 2 * np.pi, (12, 1, 1))
    field = (height * np.cos(2 * np.pi * (frequency[:, 0] * axis[:, None] + frequency[:, 1] * axis) + phase)).sum(0)
    return (field - field.min()) / np.ptp(field)


def changing_wind(rng: np.random.Generator) -> np.ndarray:
    """Draws wind [FRAMES, 2]: random walks of the speed, within SPEEDS, and of the direction."""
    walk = rng.uniform(*SPEEDS) + np.cumsum(rng.normal(0, GUST, FRAMES))
    low, high = SPEEDS
    speed = high - np.abs((walk - low) % (2 * (high - low)) - (high - low))  # reflected at both ends
    direction = rng.uniform(0, 2 * np.pi) + np.cumsum(rng.normal(0, TURN, FRAMES))
    return np.stack([speed, direction / (2 * np.pi) % 1], -1)


def _start(rng: np.random.Generator, fuel: np.ndarray) -> np.ndarray:
    """Returns a disc bool [H, W] around a cell with fuel in the middle half of the image."""
    size = len(fuel)
    middle = np.zeros_like(fuel, bool)
    middle[size // 4 : -(size // 4), size // 4 : -(size // 4)] = True
    places = np.argwhere(middle & (fuel >= min(2 * BARREN, fuel[middle].max())))
    row, column = places[rng.integers(len(places))]
    rows, columns = np.indices(fuel.shape)
    return np.hypot(rows - row, columns - column) <= max(1.0, START_RADIUS * size)


def _neighbours(padded: np.ndarray) -> np.ndarray:
    """Returns the values [8, H, W] of the neighbours from which WAYS lead to each cell; padded: [H + 2, W + 2]."""
    height, width = padded.shape
    return np.stack([padded[1 - r : height - 1 - r, 1 - c : width - 1 - c] for r, c in WAYS])
