"""`headway train`: a small language model, trained with nothing but this library's attention.

Read in this order: corpus, model, train; the rest is what a run needs besides.
"""

from .config import TrainConfig as TrainConfig
from .sample import generate as generate
from .sample import generate_many as generate_many
from .train import Trained as Trained
from .train import train as train
