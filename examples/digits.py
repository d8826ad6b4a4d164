"""Handwritten digits as weighted clouds in the plane: from images to 98 % with 33 numbers per image.

An image is the set of its inked pixels, each with its ink as weight. `FlowVectorizer` sends every image to the same
eight reference points; where the ink of each eighth lies, and how widely it is spread, is the vector of `by="step"`. (By
default slices add 512 more numbers, which digits do not need.)
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from flowpool.sklearn import FlowVectorizer

images, labels = load_digits(return_X_y=True)
ink = images.reshape(-1, 8, 8)
places = [np.argwhere(image)[:, ::-1] * [1.0, -1.0] for image in ink]  # inked pixels of each image, (N, 2)
weights = [image[image > 0] for image in ink]  # their ink, (N,)

train, test = train_test_split(np.arange(len(labels)), test_size=0.3, stratify=labels, random_state=0)
vectorizer = FlowVectorizer(8, random_state=0)
vectorizer.fit([places[i] for i in train], sample_weight=[weights[i] for i in train])
vectors = vectorizer.transform(places, sample_weight=weights)  # (1797, 33)

scaler = StandardScaler().fit(vectors[train])
classifier = SVC(C=10).fit(scaler.transform(vectors[train]), labels[train])
accuracy = classifier.score(scaler.transform(vectors[test]), labels[test])
print(f"{len(labels)} images of {min(map(len, places))} to {max(map(len, places))} pixels -> {vectors.shape}")
print(f"accuracy on {len(test)} other images: {100 * accuracy:.1f} %")

points, spread = vectorizer.inverse_transform(vectors)  # means and deviations of what each point received, (1797, 8, 2)
figure = Figure(figsize=(10, 2.6), layout="constrained")
for column, axes in enumerate(figure.subplots(2, 10).T):
    number = int(np.argmax(labels == column))
    axes[0].imshow(ink[number], cmap="gray_r")
    axes[1].scatter(*points[number].T, s=200 * spread[number].mean(1), c=range(8), cmap="tab10")
    axes[1].set(xlim=(-0.5, 7.5), ylim=(-7.5, 0.5), aspect="equal")
    for pane in axes:
        pane.set(xticks=[], yticks=[])
figure.savefig(Path("digits.png"), dpi=150)
print("digits.png: an image of each digit, and its eight points")
