"""
Orbits: clouds told apart by their shape
========================================

A map of the unit square has orbits of another shape for each value of its parameter r. Mean and deviations tell hardly
anything; what the points of a shared reference receive tells nearly all.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.metrics import ConfusionMatrixDisplay
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from flowpool import flow_pool
from flowpool.lab.datasets.orbits import PARAMETERS, make_orbits
from flowpool.sklearn import FlowVectorizer

orbits = make_orbits(num_per_class=60, num_points=300)
clouds = [orbit.x.numpy() for orbit in orbits]
classes = orbits.labels.numpy()
train, test = train_test_split(np.arange(len(clouds)), test_size=0.3, stratify=classes, random_state=0)


def predicted(vectors):
    model = make_pipeline(StandardScaler(), SVC(C=10)).fit(vectors[train], classes[train])
    return model.predict(vectors[test])


vectorizer = FlowVectorizer().fit([clouds[k] for k in train])
found = predicted(vectorizer.transform(clouds))
plain = predicted(np.array([np.r_[cloud.mean(0), cloud.std(0)] for cloud in clouds]))
print(f"right: {np.mean(found == classes[test]):.0%}; by mean and deviations {np.mean(plain == classes[test]):.0%}")

# %%
# Sixteen points for each cloud, and which orbits are taken for which.
reference = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
figure = plt.figure(figsize=(11, 7), layout="constrained")
panes = figure.subplot_mosaic([["0", "1", "2"], ["3", "4", "confusion"]])
for number, parameter in enumerate(PARAMETERS):
    points = flow_pool(orbits[number].x, reference=reference, epsilon=0.03).points[0]
    axes = panes[str(number)]
    axes.scatter(*clouds[number].T, s=7, color="tab:blue", alpha=0.6, lw=0)
    axes.scatter(*points.T, s=70, color="tab:red", edgecolor="black")
    axes.set_title(f"r = {parameter}", fontsize=15)
    axes.set(aspect="equal", xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
names = [str(parameter) for parameter in PARAMETERS]
ConfusionMatrixDisplay.from_predictions(
    classes[test], found, display_labels=names, ax=panes["confusion"], colorbar=False, cmap="Blues"
)
panes["confusion"].set_title("found for each r", fontsize=15)
