{
say() { printf "\ndlrover-remote: %s\n" "$*"; }
ours() { [ -x "$1" ] && [ $(wc -c < "$1") -eq @SIZE@ ] && [ "$("$1" @ARGUMENT@ id < /dev/null 2> /dev/null)" = @ID@ ]; }
for n in "@OWN@" dlrover-run deepspeed torchrun msrun; do
  p=$(command -v "$n" 2> /dev/null)
  case $p in /*) ours "$p" && exec "$p" @ARGUMENT@ agent ;; esac
done
u=$(umask)
umask 077
d=
for b in "$TMPDIR" /tmp /var/tmp /dev/shm "$HOME"; do
  case $b in /*) ;; *) continue ;; esac
  d=$b/@DIR@
  mkdir "$d" 2> /dev/null || { d=; continue; }
  printf "#!/bin/sh\n" 2> /dev/null > "$d/try" && chmod 700 "$d/try" && "$d/try" 2> /dev/null && break
  rm -rf "$d"
  d=
done
[ "$d" ] || { say nowhere; exit 1; }
trap "exit 129" HUP INT TERM
trap 'rm -rf "$d"' EXIT
say send
head -c @SIZE@ > "$d/dlrover-run"
chmod 700 "$d/dlrover-run"
ours "$d/dlrover-run" || { say "cannot run $(uname -m)"; exit 1; }
umask "$u"
"$d/dlrover-run" @ARGUMENT@ agent
exit $?
}
