"""The codebooks of the IQ types: each entry is four or eight small numbers, of which a block stores the
entry's place only. They are given as published with the `gguf` package (ggml-org, MIT): numbers that define
the formats.

An entry is one word, the first number in the lowest bits: two bits for each of eight, three for each of four.
The words of a book ascend; `_PACKED` has their differences, all low bytes before all high bytes, deflated, in
base 85.
"""

from __future__ import annotations

import base64
import itertools
import struct
import zlib
from functools import lru_cache

SIZES = {"IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ3_XXS": 256, "IQ3_S": 512, "IQ1": 2048}
_PACKED = (
    "c-rk(O^h5z72bMPue!Rsrh8_0W_xC5c4zi~{S!0Ta_mGQ$i^fwmV*>z#$FGZ-4NLuZyc;Zu!&X*j^M@-ML|&#D<D}yNWq9hkd??H"
    "0&(C#?zzA<iiF@02}KI;RrmbtdL2jp!H&pCyWLgw>ivB0d#|d8KuYkW1r3R`#+NlP<&Lzt?Lct_8cQ!oTc9~zo|LxOrsv#rQaI-|"
    "4>a0HGZor-@7e=@9R85x>WvwTtESux=6*GK*_3f+&&%I<ZS(_aoBLkCS1!E?=Kk?IT&%wZpU~XsulG%FKUe<2Z{JQ0n<yY7XBzwJ"
    "xEAk?hF>=2rOJ<n-xnl{myi0B?;bj1eB&*dwFjU0@Dn)q(YJn6Fo)j%%g464@bZy&AGv@bJp0Z&VD{{LvAFQwKRJrVg@+z}ZcpP4"
    "$o<<EYs=4_`qSm9sa*5*e>}STCm)sf{(dNpAEZYwmF&qV@PG7{vl$Xer>von&!n%DY#=zhVH3D0dJ={Dd1*(-VE<Z%G}cJTLL+D~"
    "Eaq&(JQFN$P+@~)P(`x{tE9HsxX_(KuUI3s%`3&-Z&3zz6n8$4%O4zVWhQt}W10S$@mHoEUpOXhCAqS%@bF6IXNv|#ckdee^TN6E"
    "6B^e0-t}(4GL91$AW5!dcsOrPQ{rojCxZL!B^HUJ*9yCA<&}^705#7uH1N)W6D`M!$wtSVGrxHFzE1I;_~7|D_}UsPie{!;GjoqT"
    "Gy0z<cE0n}<-b1~z19by33JfmxC`cDV+ke<#Q}0#W6RkC%in+OB{RNz4(1-OJ#M1mV@#(VYg7CGwd*W?)tdKC!khUczx?Z=3&iWu"
    ";D?vY;YH9>-)>wu^0!^jj)FdC+CPRj;AG_*`3IS#jv%%+=2v<snfKDlcF$X$-G&%Moees=%4_LH-|a~!@hZaE<xEkA|CydeO!}f2"
    "kG9yp^y{f$e5N2H4RZ%q`o_n)Thq9L^`<u=`)NuqTGDRiJ%g67;pE^1d)jrmxwVx=TJJ8d^`t8IJ;8N97!}14*McC8$krKEr!OdL"
    "7_)m};#e2BO^l6>aTQc9ras@_ASFM2uDpMyM{JIEY+V*?7YKhKFYBXYXl)Jq&R-KVd%en?Z4;`4>obF^qpMuQ>l3vhC!d0JB{{#@"
    "a$mh`JXd<-V9vFS%G1*XX^>IrDxWH=<kz7N4k&2`6I-A8IaU3UT`OD5ole#ZxK*Siw2nLjj!-fxEkuuBE_I!(Z{{PlPi{_W0w3$h"
    "2WH>C7Zw_wRG%FT+ld4hY14_t4HzEvI}c5~%HclMI_N)mh6~Y9CLS{{&Aw`gNk=sk$u<vG+m*e4n0WqoJ6{B914~mw00>He=T|_{"
    "tEVX2p*1w^fd?wkk<tRf>5(Fa7L*>z?@EdaN>QGr=?_9t2G4^p@z|Tv5c#=$sHPXx@Q6JeHJp&*@PSl&RV55~q%tRRMNe&4lTo=C"
    "RKE^kQe%sy9I}cKs(`stJ|6x`JfgL&)`v?ArD7O?RfmhQ$m_yHeKwqoN{1yxJCnrdd{U1ZX3IF)Hpw@)M?3QnjW;G{XY@mpvtM3_"
    "b^?gu{PtjL6-RSXX)<4j;R8cLNDx8*Eh>%VA_L+{$#Y65DHSL$r%($8Lefww%|bb8G-Cx)E67oRp`uqUbsPZUgftstNWK+f58O;n"
    "6`f8t#T6BS^a%$^OP<soPzMVnd!c0@19pM*355k6l1n*C4XBcnjOUfiF+kv1RnR6?$@p?6`I)1rBxuS0(~h!~0Vgz20mUPg&s%jA"
    "YF~O%Rj9xCIT7XzU{F&<m4gt+JXYv28dNQs2;q?v`9RTtBCL3ddE*l!BBN1x1+8)(?F)k3$Vh|S4W}s*vhR8MfLP*bq+t;dRe-V7"
    "79HEBVK@{OOP7X9p;*Q+)D=xCX`iKRkk5WY`vK})f+EhLC2(v&6*~fZ8W8PaWJ~$HH$FP7L)6A%ygP~`St*vPTVOZQjs&dEdtnSU"
    "&YV}Mlw~wZsV;BLH<J1E{8J&FlT|AruF^}$qeVeODMHsGC_w<@ynej9UbQB~gkC(QJbIj@#TwZU#CBubM4y-@5+vTxd)kYWJQIe8"
    "tGM8LhY=`iR^rLNR_wcQoK`|ni-n?>1@guYS~sf7O5N~;aFS_r7m8#<)$TP%tdSQ2*bS^llDicJs%eG$V4cIF%WO!F8muxuosYCy"
    "Lr<~$G*-tLgkB`{7CMc>O(w)YqMHj<Xpk;`R)k}2h17sBlGkg>$QV~J&MpMJ3mAmLDv${^4s6=#L981pIUnUxE`o_H97YV)i4+O)"
    "C4-_nWYFw5P`7kp)I%an+v}y6F737M=y=R0ZW=0B!U2tX(pr<GDAMdC$L~(Rc1X2G`3;4sLJ*wjCqfq3I5kt~7&1M{jhQ1N!=X5y"
    "EjhyjiN$!vPtVmIXmF7sAd?IjAIJ_<5i-tvP=!K#my=X0NDQzM7TQIX&%`KeB!&zPxpq`^v&2^melp|^dLb)4WJz;NsnCUniQ^&7"
    "G7J?(1SVS@t1uk*+`YqPhmdMhJJd?J%N3n%DWRxDRL%L$f~R-z{e>=D+Y0TJL&z2|wQJ=B{W0g;DXB<>hZJ?@Dr<yvfiIX@94$&E"
    "X_?3(^JRnbtVFORY#N(N`ACFGgB7W3iAiy!*s+y5D+Vc>nd_PD?j~KTJ8-zQ($m4ww<}#%>6X6B)J5H!Lc=e|o%7Q7t7)Fd5a}R9"
    "nZo@%+1k~imz6SZhwUgj3{emzC`y`O$|SyVM0wJY*P<&|kmXX`b|kWNW>Jk%p6G2%8}11!DCY%IL7G`&-qRF^BHyyxc~-J@ngjNN"
    "Inj0{E4OtSBpndr6hHR^c3{!7p$0*zO~V6?vP=aWkPbemo~F=<uAZq`FFH<6FohCA7W^!)WzZpIP^}<r;oB6^MyT;ffnDqt4Ks9I"
    "+3>LDu116g(V#|kJkS;Ass4J>r>JG-_-Liii52?3CJ)Gdw*nmN(vA|XqSHzZM-d-Y)%roZt0m#yYgN+ofr}^3F3qHTvaqfzOV~P4"
    "<di}>KDcy6H7%j6=W)go3`I)lI@t6I+-6(#%qv-oVdSX$a*4)*j6)<((p<=<h24&8loH8iJd%D&c+HunZv#4}wIdT(yOm>rbQcpu"
    "q;`QX`~eqpAR64OI@$LFcjvJlQMfI-PZr8oC!epUUnVnLh^GcYkn=qhh|8pQyEN|Xn+)lu^ppne`x~3$_b3Nebq@>ryiZZc8i7sw"
    "8CAe(4nx&}iv$eJ1jzJ+E@|f1S&ylu*J5OP&FfQrkzSUDuJaS0aRslvEH;tp&Ix)ErB62in_3Zl5$sLT7?RB#q}yy?YDmZ-?KG>Q"
    "oBxTMm&2P-A+E1STvJ8qCW92$jY4cb>}A8HV<63?&+3F2d~U+5R3BcYLVV_g-CjD}7G-!hgduLNm*Pf5N_R^>#qG?QxIr1bkzJzu"
    "DE$wd#2e7rn-ut|o5byH0AKvR`28RL#2wpwE6zRfc|z+}o%G^P`Cq#0vvu<p@a}i<bL}18-N1=ESRQvlL%vl7AU-#2z0*g~4Q~H0"
    "2pdQ2"
)


@lru_cache(None)
def codebook(name: str) -> bytes:
    """The words of a book, uint16 in the order of their places.

    >>> len(codebook("IQ2_XXS")), codebook("IQ2_XXS")[:6].hex()
    (512, '000002000500')
    """
    raw = zlib.decompress(base64.b85decode(_PACKED))
    half, start = len(raw) // 2, 0
    for other, size in SIZES.items():
        if other == name:
            low, high = raw[start : start + size], raw[half + start : half + start + size]
            words = itertools.accumulate([a | b << 8 for a, b in zip(low, high, strict=True)])
            return struct.pack(f"<{size}H", *words)
        start += size
    raise KeyError(name)
