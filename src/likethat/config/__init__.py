"""What a run is made with: settings with their defaults, presets of them, and the values that users write for them."""
