#!/usr/bin/env bash
# PID 1 of a machine of its own: becomes systemd on an empty root that has this machine's /usr, read-only, and what
# the folder $2 seeds. Everything else is memory: nothing of the machine that runs the tests can be changed from there.
# Started by machine.py in fresh mount, pid, uts and ipc namespaces; the network is shared, for loopback. $3 names its
# control group.
set -euo pipefail
root=$1 seed=$2 group=$3

if [ "${4:-}" != inside ]; then
  # A control group of its own: two machines at a time must not share one tree of services.
  mount --make-rprivate /
  mount -t cgroup2 cgroup2 "$root"
  mkdir "$root/$group"
  echo 0 >"$root/$group/cgroup.procs"
  umount "$root"
  exec unshare --cgroup bash "$0" "$root" "$seed" "$group" inside
fi

mount -t tmpfs -o mode=0755,size=128m machine "$root"
cd "$root"
cp -a "$seed/." .
mkdir -p usr proc sys dev run tmp var/lib var/log var/cache root old
chmod 0700 root
chmod 1777 tmp
for name in bin sbin lib lib32 lib64 libx32; do
  if [ -L "/$name" ]; then cp -a "/$name" "$name"; elif [ -d "/$name" ]; then mkdir "$name"; mount --rbind "/$name" "$name"; fi
done
for path in etc/ld.so.cache etc/alternatives etc/nsswitch.conf; do
  if [ -e "/$path" ] && [ ! -e "$path" ]; then cp -a "/$path" "$path"; fi
done

mount --rbind /usr usr
mount -o remount,bind,ro usr
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount --rbind /sys sys
mount -o remount,bind,ro sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=0755 dev dev
mkdir dev/pts dev/shm
for node in null zero full random urandom tty; do
  touch "dev/$node"
  mount --bind "/dev/$node" "dev/$node"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t tmpfs -o mode=0755 run run

pivot_root . old
umount -l /old
hostname testhost
export container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin
unset NOTIFY_SOCKET
exec /lib/systemd/systemd --system --log-target=journal-or-kmsg --log-level=info --show-status=0
