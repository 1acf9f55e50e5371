"""What is known of EFA's software: releases that go together, variables that help or harm."""
