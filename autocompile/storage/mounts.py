"""Tell whether a path lies on a network file system, whose locks SQLite cannot rely on."""

from __future__ import annotations

import re
from pathlib import Path

# 9p is no sign of a network: sandboxes and virtual machines mount local disks with it.
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "pvfs2"),
    *("davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"),
)


def network_file_system(path: Path, mounts: str) -> str | None:
    """The type of the network file system that holds this absolute path, given the text of /proc/mounts."""
    holder, kind = Path("/"), ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point))  # blanks are \040
        if path.is_relative_to(mounted) and len(mounted.parts) >= len(holder.parts):
            holder, kind = mounted, found  # of two mounts on one point the later one covers the earlier
    return kind if kind in NETWORK else None
