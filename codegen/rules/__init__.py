"""Update rules as data: a few expressions, checked when they are defined, rendered for every target, never executed."""
