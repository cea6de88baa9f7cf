"""The reference: what every operation means, in plain torch. All other backends are tested against its bits."""
