//! What is computed.
