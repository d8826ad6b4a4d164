"""From a CSV file with molecules to a table of numbers, and to a prediction of solubility.

python examples/molecules_from_csv.py FILE.csv    # SMILES and a number in each line, no header
"""

import csv
import sys

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from torch_geometric.utils import from_smiles

from flowpool.sklearn import FlowVectorizer, Propagate

if len(sys.argv) > 1:
    with open(sys.argv[1], newline="") as file:
        rows = list(csv.reader(file))
else:
    rows = [("C" * carbon + "O" * oxygen, oxygen - 0.6 * carbon) for carbon in range(1, 13) for oxygen in range(5)]
molecules = [from_smiles(smiles) for smiles, _ in rows]
solubility = np.array([float(value) for _, value in rows])

vectors = make_pipeline(Propagate(2), FlowVectorizer(size="sums", random_state=0))
table = vectors.fit_transform(molecules)
print(
    f"{len(molecules)} molecules of {min(m.num_nodes for m in molecules)} to {max(m.num_nodes for m in molecules)} atoms"
)
print(f"table: {table.shape[0]} rows of {table.shape[1]} numbers")

model = make_pipeline(vectors, RidgeCV(np.logspace(-2, 4, 13)))
found = cross_val_predict(model, molecules, solubility, cv=5)
print(
    f"error of a ridge, five folds: {np.sqrt(np.mean((found - solubility) ** 2)):.3f}; of the mean: {solubility.std():.3f}"
)
