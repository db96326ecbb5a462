#!/bin/sh
# Known vulnerabilities in what is imported and called, by govulncheck, and suspicious code, by gosec. A tool or a
# database that cannot be reached is skipped, and said to be: being offline fails nothing.
set -u
bin=${AUDIT:-$HOME/.cache/dlrover-run/audit}
folders=$(for f in "$@"; do echo "./$f/..."; done)
failed=0

# fetched installs a tool of a fixed version into the cache.
fetched() {
  GOBIN="$bin" GOFLAGS= go install "$1" 2>"$bin/log" && return
  sed 's/^/  /' "$bin/log" >&2
  echo "SKIPPED: ${1##*/} CANNOT BE INSTALLED HERE, so $2" >&2
  return 1
}

# database prepares govulncheck's own database from the Go module that has it, for where only a module proxy is reached.
database() {
  GOBIN="$bin" GOFLAGS= go install golang.org/x/vulndb/cmd/indexdb@latest 2>>"$bin/log" &&
    dir=$(cd / && GOFLAGS= go mod download -json golang.org/x/vulndb@latest 2>>"$bin/log" |
      sed -n 's/^.*"Dir": "\(.*\)".*$/\1/p') &&
    rm -rf "$bin/db" && "$bin/indexdb" -vulns "$dir/data/osv" -out "$bin/db" 2>>"$bin/log"
}

# vulnerable has the status of govulncheck: 3 means that it has found some.
vulnerable() {
  "$bin/govulncheck" "$@" $folders >"$bin/log" 2>&1
  found=$?
}

mkdir -p "$bin"
if fetched golang.org/x/vuln/cmd/govulncheck@v1.9.0 "KNOWN VULNERABILITIES ARE NOT LOOKED FOR"; then
  vulnerable
  if grep -q 'fetching vulnerabilities' "$bin/log" && database; then
    vulnerable -db "file://$bin/db"
  fi
  case $found in
  0) echo "govulncheck: no known vulnerability is called" ;;
  3)
    # Those of the standard library are mended by a newer Go, not here.
    if grep -q '^Your code is affected by .* vulnerabilit[a-z]* from the Go standard library' "$bin/log"; then
      echo "WARNING: $(go version) HAS KNOWN VULNERABILITIES that are called; build with $(sed -n \
        's/^ *Fixed in: .*@\(go[0-9.]*\)$/\1/p' "$bin/log" | sort -uV | tail -1) or newer:" >&2
      grep '^Vulnerability #' "$bin/log" >&2
    else
      cat "$bin/log"
      failed=1
    fi
    ;;
  *)
    if grep -q 'fetching vulnerabilities' "$bin/log"; then
      echo "SKIPPED: THE DATABASE OF GOVULNCHECK IS OUT OF REACH, so KNOWN VULNERABILITIES ARE NOT LOOKED FOR" >&2
    else
      cat "$bin/log"
      failed=1
    fi
    ;;
  esac
fi

# Not looked for anywhere:
#   G103 unsafe: shared memory and system calls that package syscall lacks
#   G104 errors that are not handled: of closing, and of deadlines
#   G115 conversions between integers: kernel structures, pids, wire formats; those of peers are checked where they come in
#   G204, G702 a program that comes from a variable: starting the user's programs is the launcher's work
#   G301, G302, G306 modes: reports and logs are for other users to read; what is private has 0600 or 0700, and tests
#   G304, G703 a path that comes from a variable: internal/openfile opens files that others may have replaced
#   G404 random numbers that can be guessed: they spread pauses; tokens and keys are of crypto/rand
#   G706 text of others in the log: slog and internal/text quote it
# Not looked for in some files:
#   G101 names of variables, and advice, that are no passwords
#   G102 workerport.go: the store is for other nodes
#   G402 secure.go: VerifyConnection checks servers by the pinned key, or by certificate and name
#   G124 login.go: the cookie is Secure where there is TLS
#   G704 tokens.go: it sends the request of its caller once more
#   G118 transfer.go: the function to cancel is kept, and called at the end
#   G602 phase.go: the index is compared with the length
general=G103,G104,G115,G204,G301,G302,G304,G306,G404,G702,G703,G706
local="rendezvous/api/peers.go:G101;launcher/proc/guard/conceal.go:G101;internal/app/run/elector/settings.go:G101"
local="$local;internal/app/run/auth.go:G101;internal/app/run/anymaster/workerport.go:G102"
local="$local;internal/app/page/login.go:G124;internal/plainhttp/tokens.go:G704"
local="$local;checkpointd/replica/transfer.go:G118;hang/phase.go:G602;internal/secure/secure.go:G402"
if fetched github.com/securego/gosec/v2/cmd/gosec@v2.30.0 "SUSPICIOUS CODE IS NOT LOOKED FOR"; then
  "$bin/gosec" -quiet -exclude="$general" -exclude-rules="$local" -exclude-dir=apiserver $folders || failed=1
  [ $failed = 1 ] || echo "gosec: nothing suspicious"
fi
rm -f "$bin/log"
exit $failed
