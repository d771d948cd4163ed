"""Rounds of XGBoost on real digits: a mark for each metric after each round, and the run read back.

No callback has to be added, and the estimator that ``ci.wrap`` is given stays as it is. LightGBM's
estimators work the same way. Nothing is downloaded.
"""

from __future__ import annotations

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from xgboost import XGBClassifier

import cirron_otel as ci


def main() -> None:
    """Boost, then show what was recorded."""
    ci.profile()
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images, labels, random_state=0)
    model = ci.wrap(XGBClassifier(n_estimators=20, max_depth=3, early_stopping_rounds=5, n_jobs=1))
    model.fit(images, labels, eval_set=[(test_images, test_labels)], verbose=False)
    print(f"accuracy on digits that were not seen: {model.score(test_images, test_labels):.3f}\n")
    ci.trace()
    ci.shutdown()
    print("\nThe whole run: cirron-otel traces view")


if __name__ == "__main__":
    main()
