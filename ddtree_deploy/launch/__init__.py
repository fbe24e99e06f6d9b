"""Launch model and rendering: an inventory service becomes argv, environment, systemd unit and script."""
