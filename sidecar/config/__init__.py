"""The configuration: read from a file and the environment, checked once, handed on frozen."""

from sidecar.config.credentials import ClientToken
from sidecar.config.loading import ConfigFaults, from_mapping, load
from sidecar.config.models import (
    AdminSettings,
    ConditionSettings,
    DashboardSettings,
    GatewaySettings,
    ListenSettings,
    LogSettings,
    ProbeSettings,
    SessionSettings,
    Settings,
    ShutdownSettings,
    SourceSettings,
    StoreSettings,
)
from sidecar.config.report import describe

__all__ = [
    "AdminSettings",
    "ClientToken",
    "ConditionSettings",
    "ConfigFaults",
    "DashboardSettings",
    "GatewaySettings",
    "ListenSettings",
    "LogSettings",
    "ProbeSettings",
    "SessionSettings",
    "Settings",
    "ShutdownSettings",
    "SourceSettings",
    "StoreSettings",
    "describe",
    "from_mapping",
    "load",
]
