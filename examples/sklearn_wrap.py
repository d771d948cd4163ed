"""A search over a pipeline of scikit-learn on real digits, and the run read back.

``ci.wrap`` is all there is to do: what it returns is an estimator like the one it was given, and
each call of it, of its steps and of their clones in a search is recorded, also in the processes of
``n_jobs``. Nothing is downloaded.
"""

from __future__ import annotations

from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

import cirron_otel as ci


def main() -> None:
    """Search, then show what was recorded."""
    ci.profile()
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        images[:600], labels[:600], random_state=0
    )
    model = Pipeline(
        [
            ("scale", StandardScaler()),
            ("reduce", PCA(random_state=0)),
            ("classify", LogisticRegression(max_iter=200)),
        ]
    )
    search = ci.wrap(GridSearchCV(model, {"reduce__n_components": [8, 16]}, cv=2))
    search.fit(images, labels)
    print(f"accuracy on digits that were not seen: {search.score(test_images, test_labels):.3f}\n")
    ci.trace()
    ci.shutdown()
    print("\nThe whole run: cirron-otel traces view")


if __name__ == "__main__":
    main()
