# Sourced by the stand-ins: records how each was called, quoted for a shell, one call per line.
# shellcheck shell=bash
printf -v words '%q ' "${0##*/}" "$@"
printf '%s\n' "${words% }" >>"$WORLD/calls"

# Runs a command line as sshd on another host would: in its home, without this shell's variables, session and signals.
on_machine() {
  local home=$WORLD/machines/$1
  mkdir -p "$home"
  cd "$home" || exit
  local kept=()
  mapfile -t kept < <(env | grep '^JAX_')
  exec setsid --wait env -i --default-signal HOME="$home" HOSTNAME="$1" PATH="$PATH" WORLD="$WORLD" REAL_PYTHON="$REAL_PYTHON" \
    PJRT_NPROC=16 "${kept[@]}" bash -c "$2"
}
