"""The reference backend: it defines every operation in plain torch. All other backends are tested against its bits."""
